// What moves data into shared memory on Hopper and says when it is there: mbarriers, bulk copies, and the fences
// between ordinary accesses and those of the copy engine and the tensor cores.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace nvfp4_moe::sm90 {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After all barrier_init of a thread, before the block's first barrier.
__device__ inline void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}
// One arrival; the phase then also waits for so many bytes of bulk copies.
__device__ inline void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival where yes. No branch: ptxas would serialize wgmma around one.
__device__ inline void arrive_if(uint32_t barrier, bool yes) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %1, 0;\n\t"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n\t}" ::"r"(barrier),
      "r"(static_cast<uint32_t>(yes))
      : "memory");
}
// A warp's arrival where yes, once all its lanes are there: one lane's. racecheck of compute-sanitizer looks at lanes
// one by one and takes that for the one lane's alone, so that in a build for it every lane arrives.
#ifdef NVFP4_MOE_RACECHECK
inline constexpr int kArrivalsOfWarp = 32;
#else
inline constexpr int kArrivalsOfWarp = 1;
#endif
__device__ inline void arrive_as_warp(uint32_t barrier, bool yes) {
  __syncwarp();
  arrive_if(barrier, yes && threadIdx.x % 32 < kArrivalsOfWarp);
}
// Returns once the phase of that parity has completed.
__device__ inline void wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

// What is read once must not push the activations out of L2; what other blocks read soon should stay.
template <bool kReadOnce>
__device__ uint64_t cache_policy() {
  uint64_t policy;
  if constexpr (kReadOnce)
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// A multiple of 16 bytes, both addresses too; completes on the barrier.
__device__ inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// A box of a tensor, from the element at (k, line) on; what lies outside is zeros. Completes on the barrier with the
// whole box's bytes.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int32_t k, int32_t line, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(&map), "r"(k), "r"(line), "r"(barrier)
      : "memory");
}

// 16 bytes by this thread where yes; zeros, without reading, where !valid.
__device__ inline void copy_line(uint32_t to, const void* from, bool valid, bool yes) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\t"
      "@p cp.async.cg.shared.global [%0], [%1], 16, %2;\n\t}" ::"r"(to),
      "l"(from), "r"(valid ? 16 : 0), "r"(static_cast<uint32_t>(yes))
      : "memory");
}
// An arrival of this thread once all its cp.async so far are there; the thread does not wait.
__device__ inline void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Ordinary writes to shared memory (cp.async's too) that this thread has seen, before its tensor cores' reads.
__device__ inline void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of some warps of the block; index 1..15.
template <int kThreads>
__device__ inline void sync_threads(int index) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "n"(kThreads) : "memory");
}

// Registers of a thread of this warpgroup from here on.
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace nvfp4_moe::sm90
