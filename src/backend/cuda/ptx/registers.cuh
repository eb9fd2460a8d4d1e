// Hints to the compiler about registers. Only the last function is an instruction.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace nvfp4_moe::internal::cuda::ptx {

// Makes the compiler treat the values as changed here: it moves no reads or writes of them across
// this point, and does not recompute them from their inputs.
template <int kCount>
__device__ inline void pin(uint32_t (&values)[kCount]) {
#pragma unroll
  for (uint32_t& value : values) asm volatile("" : "+r"(value));
}
template <int kCount>
__device__ inline void pin(float (&values)[kCount]) {
#pragma unroll
  for (float& value : values) asm volatile("" : "+f"(value));
}
__device__ inline void pin(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ inline uint64_t pinned(uint64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

// The compiler moves no memory access across it.
__device__ inline void compiler_fence() { asm volatile("" ::: "memory"); }

// mov of %tid.x. Volatile, unlike threadIdx.x, so that values derived from it are not kept in
// registers from before this point.
__device__ inline int read_tid_x() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return static_cast<int>(thread);
}

}  // namespace nvfp4_moe::internal::cuda::ptx
