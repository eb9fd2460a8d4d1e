// Accesses that another device or the host takes part in, at the scope of the system, and the clock
// that a wait for them is measured with.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/peer_memory.h"

namespace nvfp4_moe::internal::cuda::ptx {

// fence.acq_rel.sys: what this thread has written, or has seen of others through a barrier, comes
// before what it writes afterwards, for whoever in the system sees that.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ld.acquire.sys, st.release.sys.
__device__ inline uint32_t load_acquire_system(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_release_system(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ inline uint64_t load_acquire_system(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_release_system(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// ld.volatile, st.volatile: words that another device or the host reads and writes meanwhile, in no
// order with others.
__device__ inline uint32_t load_volatile(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_volatile(uint32_t* to, uint32_t value) {
  asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// A pair is written and read as one vector, of which each 8 bytes are seen together.
__device__ inline void store_pair(PairWithFlags* to, float first, float second, uint32_t flag) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(__float_as_uint(first)), "r"(flag), "r"(__float_as_uint(second)), "r"(flag)
               : "memory");
}
__device__ inline PairWithFlags load_pair(const PairWithFlags* from) {
  uint32_t first, first_flag, second, second_flag;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(first), "=r"(first_flag), "=r"(second), "=r"(second_flag)
               : "l"(from)
               : "memory");
  return {__uint_as_float(first), first_flag, __uint_as_float(second), second_flag};
}

// %globaltimer: nanoseconds.
__device__ inline uint64_t global_timer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

}  // namespace nvfp4_moe::internal::cuda::ptx
