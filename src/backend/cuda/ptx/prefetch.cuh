// prefetch: requests bytes of global memory into L2, without waiting.
#pragma once

#include <cuda_runtime.h>

namespace nvfp4_moe::internal::cuda::ptx {

__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

}  // namespace nvfp4_moe::internal::cuda::ptx
