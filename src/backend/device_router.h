// A router's selection (core/router.h) on arrays in a device's memory, bit for bit the host's.
//
// It enqueues one kernel in `stream` and returns: it allocates nothing, waits for nothing, and can be captured.
#pragma once

#include "core/router.h"
#include "core/status.h"

namespace nvfp4_moe {

struct DeviceRouter {
  // Precondition: as select_experts of the host. bad_ids lies on the device too.
  Status (*select_experts)(int device, const SelectExperts& call, void* stream);
};

}  // namespace nvfp4_moe
