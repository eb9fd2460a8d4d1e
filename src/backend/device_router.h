// A router (core/router_gemm.h, core/router.h) on arrays in a device's memory, bit for bit the host's.
//
// Each enqueues one kernel in `stream` and returns: it allocates nothing, waits for nothing, and can be captured.
#pragma once

#include "core/router.h"
#include "core/router_gemm.h"
#include "core/status.h"

namespace nvfp4_moe {

struct DeviceRouter {
  // Precondition: as router_gemm of the host.
  Status (*router_gemm)(int device, const RouterGemm& call, void* stream);
  // Precondition: as select_experts of the host. bad_ids lies on the device too.
  Status (*select_experts)(int device, const SelectExperts& call, void* stream);
};

}  // namespace nvfp4_moe
