// cp.async: copies of 16 or 4 bytes per thread from global to shared memory; 16-byte ones bypass
// L1.
//
// They write through the generic proxy: a reader of the asynchronous proxy, such as wgmma, needs
// fence.proxy.async after the copies have completed.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4_moe::internal::cuda::ptx {

// cp.async.cg under a predicate. If !valid it writes zeros and reads nothing. Both addresses are
// multiples of 16.
__device__ inline void cp_async_16_if(uint32_t to, const void* from, bool valid, bool predicate) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\t"
      "@p cp.async.cg.shared.global [%0], [%1], 16, %2;\n\t}" ::"r"(to),
      "l"(from), "r"(valid ? 16 : 0), "r"(static_cast<uint32_t>(predicate))
      : "memory");
}

// cp.async.cg of 16 bytes. If !valid it writes zeros and reads nothing. Both addresses are
// multiples of 16.
__device__ inline void cp_async_16_or_zeros(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// cp.async.cg of 16 bytes, bypassing L1. Both addresses are multiples of 16.
__device__ inline void cp_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
// cp.async.ca of 4 bytes, through L1; there is no other variant of this size. Both addresses are
// multiples of 4.
__device__ inline void cp_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}

// cp.async.commit_group: groups this thread's copies since the last commit.
__device__ inline void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// cp.async.wait_group: waits until at most kPending of this thread's latest groups are incomplete.
template <int kPending>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.mbarrier.arrive.noinc: makes one of the arrivals that mbarrier.init counted, when all
// earlier cp.async of this thread have completed. The thread does not wait.
__device__ inline void cp_async_mbarrier_arrive_noinc(uint32_t mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(mbarrier) : "memory");
}

}  // namespace nvfp4_moe::internal::cuda::ptx
