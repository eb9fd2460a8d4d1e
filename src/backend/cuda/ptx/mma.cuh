// sm_80's bf16 tensor core product, its fragment load, and arithmetic on pairs of bf16.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace nvfp4_moe::internal::cuda {

// d += a b, m16n8k16, bf16 in, fp32 accumulators. With r = lane/4, c = lane%4: a = (r, 2c..), (r+8,
// 2c..), (r, 2c+8..), (r+8, 2c+8..); b = (k 2c.., n r), (k 2c+8.., n r); d = (r, n 2c), (r, n
// 2c+1), (r+8, n 2c), (r+8, n 2c+1).
__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit elements; lane l passes the address of row l%8 of matrix l/8.
__device__ inline void load_matrices(uint32_t (&out)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address)
               : "memory");
}

__device__ inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product = __hmul2(reinterpret_cast<const __nv_bfloat162&>(a),
                                         reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}
__device__ inline uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  const __nv_bfloat162 sum = __hadd2(reinterpret_cast<const __nv_bfloat162&>(a),
                                     reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(sum);
}

}  // namespace nvfp4_moe::internal::cuda
