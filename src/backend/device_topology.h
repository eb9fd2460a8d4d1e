// Where a GPU is in its host, and which others it reaches: what ranks ask before they share memory, and what a refusal says.
#pragma once

#include <string>

#include "core/peer_memory.h"
#include "core/status.h"

namespace nvfp4_moe {

struct DeviceTopology {
  // "0000:3B:00.0": the same in all processes of a host, whichever devices they see and in whichever order.
  Result<std::string> (*pci_address)(int device);
  // Whether device's kernels reach the memory of the one at that address.
  Result<PeerReach> (*reach)(int device, const std::string& pci_address);
};

extern const DeviceTopology kCudaTopology;  // in builds with NVFP4_MOE_WITH_CUDA, of all its backends

}  // namespace nvfp4_moe
