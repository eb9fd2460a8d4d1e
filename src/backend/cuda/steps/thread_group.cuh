// Threads of a CTA that work on a row or a packet together.
#pragma once

#include <cuda_runtime.h>

namespace nvfp4_moe::internal::cuda {

// Either a CTA or, if there are many rows, a warp, which waits for no other warp. In a
// two-dimensional CTA, the threads of the first dimension.
struct ThreadGroup {
  int rank, size;
  __device__ static ThreadGroup cta() {
    return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  }
  __device__ static ThreadGroup warp() { return {static_cast<int>(threadIdx.x % 32), 32}; }
};

}  // namespace nvfp4_moe::internal::cuda
