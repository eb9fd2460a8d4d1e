// Hints to the compiler about registers. Only the last function is an instruction.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace nvfp4_moe::internal::cuda::ptx {

// The compiler takes the values as changed here: it moves no reads or writes of them across, and
// does not compute them again from what they were made of.
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

// The compiler moves no access to memory across.
__device__ inline void compiler_fence() { asm volatile("" ::: "memory"); }

// Reads one word of each 64 bytes of a kernel's parameters, which brings them into the constant
// cache.
template <class Parameters>
__device__ inline void prefetch_parameters(const Parameters& parameters) {
#pragma unroll
  for (size_t at = 0; at < sizeof(Parameters); at += 64)
    asm volatile("" ::"r"(
        *reinterpret_cast<const uint32_t*>(reinterpret_cast<const uint8_t*>(&parameters) + at)));
}

// mov of %tid.x. Volatile, unlike threadIdx.x, so that what is computed from it before this point
// is not kept in registers until after it.
__device__ inline int read_tid_x() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return static_cast<int>(thread);
}

}  // namespace nvfp4_moe::internal::cuda::ptx
