// Atomic operations with a memory order, on counters that several ctas wait for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4_moe::internal::cuda::ptx {

// atom.acq_rel.gpu.global.add of 1; returns the value before. Earlier writes of this thread (and
// writes of its cta that it has observed through a barrier) are visible to threads that add later;
// writes of earlier ones are visible to this thread.
__device__ inline int32_t atomic_increment_acq_rel(int32_t* counter) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// red.release.gpu.global.add: earlier writes become visible as above, but those of others do not.
// Returns nothing, so that the thread need not wait.
__device__ inline void reduce_add_release(uint32_t* counter, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// ld.relaxed.gpu: unlike ld.acquire.gpu, it does not wait for this thread's earlier accesses.
__device__ inline uint32_t load_relaxed(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// ld.acquire.gpu.
__device__ inline uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

}  // namespace nvfp4_moe::internal::cuda::ptx
