// System-scope accesses, shared with another device or the host, and the clock that limits waits
// for them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/peer_memory.h"

namespace nvfp4_moe::internal::cuda::ptx {

// fence.acq_rel.sys: orders earlier writes of this thread, and writes that it has observed through
// a barrier, before its later writes, for all observers in the system.
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

// ld.volatile, st.volatile: words that another device or the host accesses concurrently, not
// ordered with other accesses.
__device__ inline uint32_t load_volatile(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ inline void store_volatile(uint32_t* to, uint32_t value) {
  asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// A pair is written and read as one vector; each 8 bytes are always seen together.
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

// %globaltimer, in nanoseconds.
__device__ inline uint64_t global_timer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

}  // namespace nvfp4_moe::internal::cuda::ptx
