// Converts CUDA's error codes to Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/status.h"

namespace nvfp4_moe::internal::cuda {

// Ok, kOutOfMemory, or kInternal with `what` and CUDA's message. Also clears CUDA's last error,
// which other code in the process, such as torch, would otherwise take for its own.
inline Status check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  const Code code = error == cudaErrorMemoryAllocation ? Code::kOutOfMemory : Code::kInternal;
  return {code, std::string(what) + ": " + cudaGetErrorString(error)};
}

// Call it after a kernel launch: reports the launch's own error, not one of the kernel.
inline Status check_launch(const char* kernel) { return check(cudaGetLastError(), kernel); }

}  // namespace nvfp4_moe::internal::cuda
