// tcgen05: tensor core products of compute capability 10.x. Accumulators and block scales are in
// tensor memory: 128 lanes of 512 columns of 32 bits. Only in the instruction sets of sm_100a,
// sm_103a and the family 100f.
//
// mma, cp and commit are asynchronous and issued by one thread. A product sees the tensor memory
// writes of earlier copies of the same thread, and products of one thread execute in order. A
// tensor memory address has the lane in its upper half and the column in its lower half. Warp w can
// access only the 32 lanes from 32 (w % 4) on.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/wait_limit.cuh"

namespace nvfp4_moe::internal::cuda::ptx {

// elect.sync: true in one lane of a whole warp. It tells the compiler that the code after it runs
// in one thread.
__device__ inline bool elect_one() {
  uint32_t elected;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}"
               : "=r"(elected));
  return elected != 0;
}

// tcgen05.alloc: waits for that many free columns (a power of two from 32 on) and writes the first
// one's address to shared memory. Executed by a whole warp, which also deallocates them.
template <int kColumns>
__device__ inline void tcgen05_alloc(uint32_t result) {
  static_assert(kColumns >= 32 && kColumns <= 512 && (kColumns & (kColumns - 1)) == 0);
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(result),
               "n"(kColumns)
               : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}
template <int kColumns>
__device__ inline void tcgen05_dealloc(uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(columns), "n"(kColumns)
               : "memory");
}

// tcgen05.fence: before_thread_sync orders what this thread has issued or waited for before a
// following barrier; after_thread_sync keeps later operations from being issued before the barrier.
__device__ inline void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ inline void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// The layout of an operand's rows in shared memory, K-major: the swizzle, which determines the
// length of a row.
enum class Swizzle : uint32_t { kNone = 0, k128B = 2, k64B = 4 };
// The descriptor of an operand, or of the source of a copy, at a 16-byte aligned address: eight
// rows are contiguous, the next eight are stride_bytes further.
__device__ inline uint64_t tcgen05_descriptor(uint32_t address, uint32_t stride_bytes,
                                              Swizzle swizzle) {
  constexpr uint64_t kVersion = uint64_t{1} << 46;
  return (kVersion | static_cast<uint64_t>(swizzle) << 61 | uint64_t{stride_bytes / 16} << 32 |
          (address & 0x3FFFF) / 16) ^
         planted_stride();
}

// tcgen05.cp.32x128b.warpx4: copies 512 bytes of shared memory, 16 for each of 32 rows, into four
// columns, replicated in each of the four groups of 32 lanes. Products read block scales there.
__device__ inline void tcgen05_copy_scales(uint32_t to, uint64_t from) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(from) : "memory");
}

// The instruction descriptor of E2M1 operands with UE4M3 scales: m 128, n a multiple of 8 up to
// 256. Scale selectors 0.
__device__ inline uint32_t tcgen05_fp4_kind(int n) {
  constexpr uint32_t kE2m1A = 1u << 7, kE2m1B = 1u << 10, kM128 = 1u << 27;
  return kE2m1A | kE2m1B | kM128 | static_cast<uint32_t>(n / 8) << 17;
}
// tcgen05.mma kind::mxf4nvf4 block16: d (128, n) += a (128, 64) b (n, 64); without `accumulate`, =.
// scales_a, scales_b: four columns each; row r's scales of its four blocks are in lane r % 32 of
// column r / 32. More than 128 rows use eight columns.
__device__ inline void tcgen05_mma_fp4(uint32_t d, uint64_t a, uint64_t b, uint32_t kind,
                                       uint32_t scales_a, uint32_t scales_b, bool accumulate) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %6, 0;\n\t"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], "
      "p;\n\t}" ::"r"(d),
      "l"(a), "l"(b), "r"(kind), "r"(scales_a), "r"(scales_b),
      "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// The instruction descriptor of bf16 operands with fp32 accumulators: m 128, n a multiple of 16 up
// to 256.
__device__ inline uint32_t tcgen05_bf16_kind(int n) {
  constexpr uint32_t kF32D = 1u << 4, kBf16A = 1u << 7, kBf16B = 1u << 10, kM128 = 8u << 24;
  return kF32D | kBf16A | kBf16B | kM128 | static_cast<uint32_t>(n / 8) << 17;
}
// tcgen05.mma kind::f16: d (128, n) += a (128, 16) b (n, 16); without `accumulate`, =.
__device__ inline void tcgen05_mma_bf16(uint32_t d, uint64_t a, uint64_t b, uint32_t kind,
                                        bool accumulate) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %4, 0;\n\t"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n\t}" ::"r"(d),
      "l"(a), "l"(b), "r"(kind), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// tcgen05.commit: one arrival at an mbarrier of this cta when all copies and products that this
// thread has issued are done. Implies fence::before_thread_sync.
__device__ inline void tcgen05_commit(uint32_t mbarrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(mbarrier)
      : "memory");
}

// tcgen05.ld.16x256b: from 16 lanes starting at the address's lane and 8 kCount columns, loads four
// values per eight columns: with r = lane / 4, q = lane % 4 (lane r, column 2q), (r, 2q + 1), (r +
// 8, 2q), (r + 8, 2q + 1). They are valid after tcgen05_wait_load.
__device__ inline void tcgen05_load_16x256b(uint32_t (&to)[4], uint32_t from) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}
__device__ inline void tcgen05_load_16x256b(uint32_t (&to)[16], uint32_t from) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x4.b32 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, [%16];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]), "=r"(to[4]), "=r"(to[5]), "=r"(to[6]),
        "=r"(to[7]), "=r"(to[8]), "=r"(to[9]), "=r"(to[10]), "=r"(to[11]), "=r"(to[12]),
        "=r"(to[13]), "=r"(to[14]), "=r"(to[15])
      : "r"(from));
}
// tcgen05.wait::ld: the registers of all loads of this thread are valid. The reader must pin them
// after it.
__device__ inline void tcgen05_wait_load() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

}  // namespace nvfp4_moe::internal::cuda::ptx
