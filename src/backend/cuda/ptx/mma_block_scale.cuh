// mma.sync with block scales: FP4 operands and their E4M3 scales go directly into the tensor core.
// Only in the instruction sets of sm_120a and the family 120f.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4_moe::internal::cuda::ptx {

// mma.sync.m16n8k64 kind::mxf4nvf4 scale_vec::4X: d += a b, e2m1 in, an E4M3 scale for each 16 k of
// a row of a and of a column of b, fp32 accumulators. With r = lane / 4, q = lane % 4, eight k per
// register:
//   a = (r, k 8q), (r + 8, k 8q), (r, k 32 + 8q), (r + 8, k 32 + 8q)
//   scales_a: four of row r in lane 4r, of r + 8 in 4r + 1
//   b0, b1 = (k 8q, n r), (k 32 + 8q, n r)
//   scales_b: four of column r in lane 4r
//   d as of m16n8k16: (r, n 2q), (r, n 2q + 1), (r + 8, n 2q), (r + 8, n 2q + 1)
// The byte and lane selectors are 0.
__device__ inline void mma_fp4(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1,
                               uint32_t scales_a, uint32_t scales_b) {
  constexpr uint16_t kFirst = 0;
  asm volatile(
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1."
      "f32.ue4m3 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,%12}, {%11}, {%12,%12};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(scales_a), "r"(scales_b),
        "h"(kFirst));
}

}  // namespace nvfp4_moe::internal::cuda::ptx
