// bar.sync: the 16 hardware barriers of a cta, for some of its warps. __syncthreads uses barrier 0.
#pragma once

#include <cuda_runtime.h>

namespace nvfp4_moe::internal::cuda::ptx {

// bar.sync of kThreads threads (whole warps); index 1 to 15. Orders their memory accesses as
// __syncthreads does.
template <int kThreads>
__device__ inline void named_barrier_sync(int index) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "n"(kThreads) : "memory");
}
// The same for a number of threads that is known at run time.
__device__ inline void named_barrier_sync(int index, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

}  // namespace nvfp4_moe::internal::cuda::ptx
