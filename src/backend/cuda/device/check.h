// CUDA's error codes as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/status.h"

namespace nvfp4_moe::internal::cuda {

// Ok, kOutOfMemory, or kInternal with `what` and CUDA's own words. It also clears CUDA's last
// error: the next to ask for that, torch for example, would else take it for its own.
inline Status check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  const Code code = error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kInternal;
  return {code, std::string(what) + ": " + cudaGetErrorString(error)};
}

// After a kernel launch: the launch's own error, not one of the kernel's.
inline Status check_launch(const char* kernel) { return check(cudaGetLastError(), kernel); }

}  // namespace nvfp4_moe::internal::cuda
