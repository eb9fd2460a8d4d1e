// mbarrier: barriers in shared memory that count arrivals of threads and bytes of asynchronous
// copies.
//
// A barrier is 8 bytes of shared memory, 8-byte aligned. A phase completes after the number of
// arrivals given to mbarrier.init and all expected bytes; then the next phase begins. Phases
// alternate between parity 0 and 1, beginning with 0, so a wait for parity 1 of a new barrier
// returns immediately.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/wait_limit.cuh"

namespace nvfp4_moe::internal::cuda::ptx {

// mbarrier.init. Called by one thread, before any other use of the barrier.
__device__ inline void mbarrier_init(uint32_t mbarrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}

// mbarrier.arrive.expect_tx: one arrival; the phase also waits for that many bytes of bulk copies.
// Releases this thread's earlier writes to threads that see the phase complete.
__device__ inline void mbarrier_arrive_expect_tx(uint32_t mbarrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier),
               "r"(bytes + planted_bytes(bytes))
               : "memory");
}

// mbarrier.arrive: one arrival, with release semantics at cta scope.
__device__ inline void mbarrier_arrive(uint32_t mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}

// mbarrier.arrive under a predicate. A branch around the instruction would make ptxas serialize
// wgmma.
__device__ inline void mbarrier_arrive_if(uint32_t mbarrier, bool predicate) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %1, 0;\n\t"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n\t}" ::"r"(mbarrier),
      "r"(static_cast<uint32_t>(predicate))
      : "memory");
}

// mbarrier.try_wait.parity, repeated until the phase of that parity has completed. Acquires at cta
// scope the writes before the arrivals, and makes the bytes of completed bulk copies visible to
// ordinary reads.
__device__ inline void mbarrier_wait(uint32_t mbarrier, uint32_t parity,
                                     WaitSite site = wait_site()) {
  WaitLimit limit(mbarrier, parity, site);
  uint32_t done = 0;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 "
        "%0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(mbarrier), "r"(parity)
        : "memory");
    limit.check(done != 0);
  } while (done == 0);
}

}  // namespace nvfp4_moe::internal::cuda::ptx
