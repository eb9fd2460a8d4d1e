// Address conversion for PTX instructions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4_moe::internal::cuda::ptx {

// The 32-bit address in this cta's shared window. pointer: a generic pointer into shared memory.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace nvfp4_moe::internal::cuda::ptx
