// The format functions on a CUDA device (backend/device_functions.h).
#pragma once

#include "backend/device_functions.h"

namespace nvfp4_moe::internal::cuda {

extern const DeviceFormats kFormats;

}  // namespace nvfp4_moe::internal::cuda
