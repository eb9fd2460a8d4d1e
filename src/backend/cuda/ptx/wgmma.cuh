// wgmma with A in registers: the product of one warpgroup, and the fence, commit and wait around
// it.
//
// wgmma        d (64, N) fp32 += a (64, 16) bf16 * b (16, N) bf16 wgmma_e4m3   d (64, N) fp32 += a
// (64, 32) E4M3 * b (32, N) E4M3, added with fewer bits than fp32
//              has (docs/explanation/numerics.md)
//
// Warp w of the warpgroup holds rows 16w + r and 16w + r + 8, with r = lane / 4 and c = lane % 4:
//
//   a, bf16  = (r, 2c..), (r + 8, 2c..), (r, 2c + 8..), (r + 8, 2c + 8..)        two k each
//   a, E4M3  = (r, 4c..), (r + 8, 4c..), (r, 4c + 16..), (r + 8, 4c + 16..)      four k each
//   d[4j..]  = (r, n 8j + 2c), (r, n 8j + 2c + 1), (r + 8, n 8j + 2c), (r + 8, n 8j + 2c + 1)
//
// b is in shared memory, K-major: N rows of 128 bytes (64 k in bf16, 128 in E4M3) in the 128-byte
// swizzle.
//
// The instruction has every accumulator register as a separate operand, so its text differs with N.
// The macros below generate the texts; a template cannot, since an asm string is not an expression
// of template arguments.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/wait_limit.cuh"

namespace nvfp4_moe::internal::cuda::ptx {

// wgmma.fence: wgmma issued after it may read registers of a and d that were written before.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group: closes the group of the products issued so far.
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// wgmma.wait_group: waits until at most kPending of the latest groups still run. The registers and
// shared memory of the others are free, and their d is valid.
template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The matrix descriptor of b, at a shared memory address that is a multiple of 1024, K-major in the
// 128-byte swizzle. Add 2 for the next wgmma along K: 32 bytes, counted in 16 bytes.
__device__ inline uint64_t wgmma_descriptor_128b(uint32_t address) {
  constexpr uint64_t kStrideOf8Rows = uint64_t{1024 / 16} << 32, kLeading = uint64_t{1} << 16,
                     kSwizzle128 = 1ull << 62;
  return (kSwizzle128 | kStrideOf8Rows | kLeading | ((address & 0x3FFFF) >> 4)) ^ planted_stride();
}

// clang-format off
// One overload for each N = 8 q, selected by the size of d. Operands are numbered in fours: d is
// fours 0 .. q - 1, a is four q, and the descriptor is the first operand of four q + 1.
#define NVFP4_MOE_FOUR_0 "%0, %1, %2, %3"
#define NVFP4_MOE_FOUR_1 "%4, %5, %6, %7"
#define NVFP4_MOE_FOUR_2 "%8, %9, %10, %11"
#define NVFP4_MOE_FOUR_3 "%12, %13, %14, %15"
#define NVFP4_MOE_FOUR_4 "%16, %17, %18, %19"
#define NVFP4_MOE_FOUR_5 "%20, %21, %22, %23"
#define NVFP4_MOE_FOUR_6 "%24, %25, %26, %27"
#define NVFP4_MOE_FOUR_7 "%28, %29, %30, %31"
#define NVFP4_MOE_FOUR_8 "%32, %33, %34, %35"
#define NVFP4_MOE_FOUR_9 "%36, %37, %38, %39"
#define NVFP4_MOE_FOUR_10 "%40, %41, %42, %43"
#define NVFP4_MOE_FOUR_11 "%44, %45, %46, %47"
#define NVFP4_MOE_FOUR_12 "%48, %49, %50, %51"
#define NVFP4_MOE_FOUR_13 "%52, %53, %54, %55"
#define NVFP4_MOE_FOUR_14 "%56, %57, %58, %59"
#define NVFP4_MOE_FOUR_15 "%60, %61, %62, %63"
#define NVFP4_MOE_FOUR_16 "%64, %65, %66, %67"
#define NVFP4_MOE_FOUR_17 "%68, %69, %70, %71"
#define NVFP4_MOE_FOUR_18 "%72, %73, %74, %75"
#define NVFP4_MOE_FOUR_19 "%76, %77, %78, %79"
#define NVFP4_MOE_FOUR_20 "%80, %81, %82, %83"
#define NVFP4_MOE_FOUR_21 "%84, %85, %86, %87"
#define NVFP4_MOE_FOUR_22 "%88, %89, %90, %91"
#define NVFP4_MOE_FOUR_23 "%92, %93, %94, %95"
#define NVFP4_MOE_FOUR_24 "%96, %97, %98, %99"
#define NVFP4_MOE_FOUR_25 "%100, %101, %102, %103"
#define NVFP4_MOE_FOUR_26 "%104, %105, %106, %107"
#define NVFP4_MOE_FOUR_27 "%108, %109, %110, %111"
#define NVFP4_MOE_FOUR_28 "%112, %113, %114, %115"
#define NVFP4_MOE_FOUR_29 "%116, %117, %118, %119"
#define NVFP4_MOE_FOUR_30 "%120, %121, %122, %123"
#define NVFP4_MOE_FOUR_31 "%124, %125, %126, %127"
#define NVFP4_MOE_FOUR_32 "%128, %129, %130, %131"
#define NVFP4_MOE_B_1 "%8"
#define NVFP4_MOE_B_2 "%12"
#define NVFP4_MOE_B_3 "%16"
#define NVFP4_MOE_B_4 "%20"
#define NVFP4_MOE_B_5 "%24"
#define NVFP4_MOE_B_6 "%28"
#define NVFP4_MOE_B_7 "%32"
#define NVFP4_MOE_B_8 "%36"
#define NVFP4_MOE_B_9 "%40"
#define NVFP4_MOE_B_10 "%44"
#define NVFP4_MOE_B_11 "%48"
#define NVFP4_MOE_B_12 "%52"
#define NVFP4_MOE_B_13 "%56"
#define NVFP4_MOE_B_14 "%60"
#define NVFP4_MOE_B_15 "%64"
#define NVFP4_MOE_B_16 "%68"
#define NVFP4_MOE_B_18 "%76"
#define NVFP4_MOE_B_20 "%84"
#define NVFP4_MOE_B_22 "%92"
#define NVFP4_MOE_B_24 "%100"
#define NVFP4_MOE_B_26 "%108"
#define NVFP4_MOE_B_28 "%116"
#define NVFP4_MOE_B_30 "%124"
#define NVFP4_MOE_B_32 "%132"
#define NVFP4_MOE_FOURS_1 NVFP4_MOE_FOUR_0
#define NVFP4_MOE_FOURS_2 NVFP4_MOE_FOURS_1 ", " NVFP4_MOE_FOUR_1
#define NVFP4_MOE_FOURS_3 NVFP4_MOE_FOURS_2 ", " NVFP4_MOE_FOUR_2
#define NVFP4_MOE_FOURS_4 NVFP4_MOE_FOURS_3 ", " NVFP4_MOE_FOUR_3
#define NVFP4_MOE_FOURS_5 NVFP4_MOE_FOURS_4 ", " NVFP4_MOE_FOUR_4
#define NVFP4_MOE_FOURS_6 NVFP4_MOE_FOURS_5 ", " NVFP4_MOE_FOUR_5
#define NVFP4_MOE_FOURS_7 NVFP4_MOE_FOURS_6 ", " NVFP4_MOE_FOUR_6
#define NVFP4_MOE_FOURS_8 NVFP4_MOE_FOURS_7 ", " NVFP4_MOE_FOUR_7
#define NVFP4_MOE_FOURS_9 NVFP4_MOE_FOURS_8 ", " NVFP4_MOE_FOUR_8
#define NVFP4_MOE_FOURS_10 NVFP4_MOE_FOURS_9 ", " NVFP4_MOE_FOUR_9
#define NVFP4_MOE_FOURS_11 NVFP4_MOE_FOURS_10 ", " NVFP4_MOE_FOUR_10
#define NVFP4_MOE_FOURS_12 NVFP4_MOE_FOURS_11 ", " NVFP4_MOE_FOUR_11
#define NVFP4_MOE_FOURS_13 NVFP4_MOE_FOURS_12 ", " NVFP4_MOE_FOUR_12
#define NVFP4_MOE_FOURS_14 NVFP4_MOE_FOURS_13 ", " NVFP4_MOE_FOUR_13
#define NVFP4_MOE_FOURS_15 NVFP4_MOE_FOURS_14 ", " NVFP4_MOE_FOUR_14
#define NVFP4_MOE_FOURS_16 NVFP4_MOE_FOURS_15 ", " NVFP4_MOE_FOUR_15
#define NVFP4_MOE_FOURS_17 NVFP4_MOE_FOURS_16 ", " NVFP4_MOE_FOUR_16
#define NVFP4_MOE_FOURS_18 NVFP4_MOE_FOURS_17 ", " NVFP4_MOE_FOUR_17
#define NVFP4_MOE_FOURS_19 NVFP4_MOE_FOURS_18 ", " NVFP4_MOE_FOUR_18
#define NVFP4_MOE_FOURS_20 NVFP4_MOE_FOURS_19 ", " NVFP4_MOE_FOUR_19
#define NVFP4_MOE_FOURS_21 NVFP4_MOE_FOURS_20 ", " NVFP4_MOE_FOUR_20
#define NVFP4_MOE_FOURS_22 NVFP4_MOE_FOURS_21 ", " NVFP4_MOE_FOUR_21
#define NVFP4_MOE_FOURS_23 NVFP4_MOE_FOURS_22 ", " NVFP4_MOE_FOUR_22
#define NVFP4_MOE_FOURS_24 NVFP4_MOE_FOURS_23 ", " NVFP4_MOE_FOUR_23
#define NVFP4_MOE_FOURS_25 NVFP4_MOE_FOURS_24 ", " NVFP4_MOE_FOUR_24
#define NVFP4_MOE_FOURS_26 NVFP4_MOE_FOURS_25 ", " NVFP4_MOE_FOUR_25
#define NVFP4_MOE_FOURS_27 NVFP4_MOE_FOURS_26 ", " NVFP4_MOE_FOUR_26
#define NVFP4_MOE_FOURS_28 NVFP4_MOE_FOURS_27 ", " NVFP4_MOE_FOUR_27
#define NVFP4_MOE_FOURS_29 NVFP4_MOE_FOURS_28 ", " NVFP4_MOE_FOUR_28
#define NVFP4_MOE_FOURS_30 NVFP4_MOE_FOURS_29 ", " NVFP4_MOE_FOUR_29
#define NVFP4_MOE_FOURS_31 NVFP4_MOE_FOURS_30 ", " NVFP4_MOE_FOUR_30
#define NVFP4_MOE_FOURS_32 NVFP4_MOE_FOURS_31 ", " NVFP4_MOE_FOUR_31
#define NVFP4_MOE_D(i) "+f"(d[4 * i]), "+f"(d[4 * i + 1]), "+f"(d[4 * i + 2]), "+f"(d[4 * i + 3])
#define NVFP4_MOE_D_1 NVFP4_MOE_D(0)
#define NVFP4_MOE_D_2 NVFP4_MOE_D_1, NVFP4_MOE_D(1)
#define NVFP4_MOE_D_3 NVFP4_MOE_D_2, NVFP4_MOE_D(2)
#define NVFP4_MOE_D_4 NVFP4_MOE_D_3, NVFP4_MOE_D(3)
#define NVFP4_MOE_D_5 NVFP4_MOE_D_4, NVFP4_MOE_D(4)
#define NVFP4_MOE_D_6 NVFP4_MOE_D_5, NVFP4_MOE_D(5)
#define NVFP4_MOE_D_7 NVFP4_MOE_D_6, NVFP4_MOE_D(6)
#define NVFP4_MOE_D_8 NVFP4_MOE_D_7, NVFP4_MOE_D(7)
#define NVFP4_MOE_D_9 NVFP4_MOE_D_8, NVFP4_MOE_D(8)
#define NVFP4_MOE_D_10 NVFP4_MOE_D_9, NVFP4_MOE_D(9)
#define NVFP4_MOE_D_11 NVFP4_MOE_D_10, NVFP4_MOE_D(10)
#define NVFP4_MOE_D_12 NVFP4_MOE_D_11, NVFP4_MOE_D(11)
#define NVFP4_MOE_D_13 NVFP4_MOE_D_12, NVFP4_MOE_D(12)
#define NVFP4_MOE_D_14 NVFP4_MOE_D_13, NVFP4_MOE_D(13)
#define NVFP4_MOE_D_15 NVFP4_MOE_D_14, NVFP4_MOE_D(14)
#define NVFP4_MOE_D_16 NVFP4_MOE_D_15, NVFP4_MOE_D(15)
#define NVFP4_MOE_D_17 NVFP4_MOE_D_16, NVFP4_MOE_D(16)
#define NVFP4_MOE_D_18 NVFP4_MOE_D_17, NVFP4_MOE_D(17)
#define NVFP4_MOE_D_19 NVFP4_MOE_D_18, NVFP4_MOE_D(18)
#define NVFP4_MOE_D_20 NVFP4_MOE_D_19, NVFP4_MOE_D(19)
#define NVFP4_MOE_D_21 NVFP4_MOE_D_20, NVFP4_MOE_D(20)
#define NVFP4_MOE_D_22 NVFP4_MOE_D_21, NVFP4_MOE_D(21)
#define NVFP4_MOE_D_23 NVFP4_MOE_D_22, NVFP4_MOE_D(22)
#define NVFP4_MOE_D_24 NVFP4_MOE_D_23, NVFP4_MOE_D(23)
#define NVFP4_MOE_D_25 NVFP4_MOE_D_24, NVFP4_MOE_D(24)
#define NVFP4_MOE_D_26 NVFP4_MOE_D_25, NVFP4_MOE_D(25)
#define NVFP4_MOE_D_27 NVFP4_MOE_D_26, NVFP4_MOE_D(26)
#define NVFP4_MOE_D_28 NVFP4_MOE_D_27, NVFP4_MOE_D(27)
#define NVFP4_MOE_D_29 NVFP4_MOE_D_28, NVFP4_MOE_D(28)
#define NVFP4_MOE_D_30 NVFP4_MOE_D_29, NVFP4_MOE_D(29)
#define NVFP4_MOE_D_31 NVFP4_MOE_D_30, NVFP4_MOE_D(30)
#define NVFP4_MOE_D_32 NVFP4_MOE_D_31, NVFP4_MOE_D(31)
#define NVFP4_MOE_WGMMA(name, shape_and_types, q, last)                                            \
  __device__ inline void name(float (&d)[4 * q], const uint32_t* a, uint64_t b) {                  \
    asm volatile("wgmma.mma_async.sync.aligned." shape_and_types " {"                              \
                 NVFP4_MOE_FOURS_##q "}, {" NVFP4_MOE_FOUR_##q "}, " NVFP4_MOE_B_##q ", 1, 1, 1" last ";" \
                 : NVFP4_MOE_D_##q                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                            \
  }
#define NVFP4_MOE_WGMMA_BF16(n, q) NVFP4_MOE_WGMMA(wgmma, "m64n" #n "k16.f32.bf16.bf16", q, ", 0")
#define NVFP4_MOE_WGMMA_E4M3(n, q) NVFP4_MOE_WGMMA(wgmma_e4m3, "m64n" #n "k32.f32.e4m3.e4m3", q, "")
#define NVFP4_MOE_WGMMAS(n, q) NVFP4_MOE_WGMMA_BF16(n, q) NVFP4_MOE_WGMMA_E4M3(n, q)
NVFP4_MOE_WGMMAS(8, 1)
NVFP4_MOE_WGMMAS(16, 2)
NVFP4_MOE_WGMMAS(24, 3)
NVFP4_MOE_WGMMAS(32, 4)
NVFP4_MOE_WGMMAS(40, 5)
NVFP4_MOE_WGMMAS(48, 6)
NVFP4_MOE_WGMMAS(56, 7)
NVFP4_MOE_WGMMAS(64, 8)
NVFP4_MOE_WGMMAS(72, 9)
NVFP4_MOE_WGMMAS(80, 10)
NVFP4_MOE_WGMMAS(88, 11)
NVFP4_MOE_WGMMAS(96, 12)
NVFP4_MOE_WGMMAS(104, 13)
NVFP4_MOE_WGMMAS(112, 14)
NVFP4_MOE_WGMMAS(120, 15)
NVFP4_MOE_WGMMAS(128, 16)
NVFP4_MOE_WGMMA_E4M3(144, 18)
NVFP4_MOE_WGMMA_E4M3(160, 20)
NVFP4_MOE_WGMMA_E4M3(176, 22)
NVFP4_MOE_WGMMA_E4M3(192, 24)
NVFP4_MOE_WGMMA_E4M3(208, 26)
NVFP4_MOE_WGMMA_E4M3(224, 28)
NVFP4_MOE_WGMMA_E4M3(240, 30)
NVFP4_MOE_WGMMA_E4M3(256, 32)
#undef NVFP4_MOE_WGMMAS
#undef NVFP4_MOE_WGMMA_E4M3
#undef NVFP4_MOE_WGMMA_BF16
#undef NVFP4_MOE_WGMMA
// clang-format on

}  // namespace nvfp4_moe::internal::cuda::ptx
