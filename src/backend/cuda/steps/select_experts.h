// A router's selection on a CUDA device (backend/device_router.h).
#pragma once

#include "backend/device_router.h"

namespace nvfp4_moe::cuda {

extern const DeviceRouter kRouter;

}  // namespace nvfp4_moe::cuda
