// Converts eight bf16 elements to NVFP4, if the row's scale s is a power of two.
//
// y = x / s is exact or far below every boundary. The quotient t of y and the block's e4m3 is
// rounded to e2m1 by adding and subtracting a number whose ulp is e2m1's at t. If t is on a
// boundary between two e2m1 values it is computed exactly; otherwise it is at least 2^-15 of a
// boundary away. So the codes are those of quantize_block.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "backend/cuda/steps/formats.cuh"

namespace nvfp4_moe::internal::cuda {

// Half of a block of 16.
struct Vec8 {
  uint32_t codes;  // 4 bits each
  uint4 operand;   // e2m1 * e4m3 in bf16
  // For the whole block of 16:
  uint32_t scale;  // the e4m3 byte
  bool saturated, zeroed;

  // inverse = 1 / s. Called by a whole warp: the neighbouring lane has the other half of a block.
  __device__ static Vec8 of(const uint4& x, float inverse);
};

__device__ inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product = __hmul2(reinterpret_cast<const __nv_bfloat162&>(a),
                                         reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}
// Reduces eight magnitudes to two halves, each the larger of its four.
__device__ inline uint32_t larger_magnitudes(const uint4& x) {
  constexpr uint32_t kMagnitudes = 0x7FFF7FFFu;
  return __vmaxu2(__vmaxu2(x.x & kMagnitudes, x.y & kMagnitudes),
                  __vmaxu2(x.z & kMagnitudes, x.w & kMagnitudes));
}
// The larger of two bf16 magnitudes, as fp32 bits.
__device__ inline uint32_t larger_half(uint32_t pair) {
  return max(pair << 16, pair & 0xFFFF0000u);
}

// 1 / v within about an ulp.
__device__ inline float near_inverse(float v) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v));
  return inverse;
}

// The e2m1 value nearest to a magnitude t, ties to the even code.
struct NearestE2m1 {
  float value;
  uint32_t code;

  // t = |y| / v, with inverse near 1 / v; 0 if inverse is 0.
  __device__ NearestE2m1(float y, float v, float inverse) {
    const float near = fabsf(y) * inverse;
    const float t = fminf(fmaf(fmaf(-near, v, fabsf(y)), inverse, near), 6.0f);
    const uint32_t exponent = max(__float_as_uint(t) & 0x7F800000u, 0x3F800000u);
    // 1.5 * 2^22 * 2^exponent: its ulp is half of 2^exponent
    const uint32_t offset = exponent + 0x0B400000u;
    const float sum = t + __uint_as_float(offset);
    value = sum - __uint_as_float(offset);
    code = __float_as_uint(sum) - offset + (exponent >> 22) - (127u << 1);
  }
};

__device__ inline Vec8 Vec8::of(const uint4& x, float inverse) {
  uint32_t magnitudes = larger_magnitudes(x);
  magnitudes = __vmaxu2(magnitudes, __shfl_xor_sync(0xFFFFFFFFu, magnitudes, 1));
  const uint32_t amax = larger_half(magnitudes);
  const float scale = (__uint_as_float(amax) * inverse) * (1.0f / 6.0f);
  Vec8 vec8;
  vec8.scale = e4m3_from_float(scale);
  vec8.saturated = scale > 448;
  vec8.zeroed = vec8.scale == 0 && amax != 0;

  const float v = e4m3_to_float(vec8.scale);
  const float inverse_v = vec8.scale != 0 ? near_inverse(v) : 0;
  const uint32_t signs = vec8.scale != 0 ? 0x80008000u : 0;
  const uint32_t v_pair = __byte_perm(__float_as_uint(v), 0, 0x3232);
  const uint32_t inverse_pair = __byte_perm(__float_as_uint(inverse), 0, 0x3232);
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  uint32_t operand[4];
  vec8.codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t y = multiply_pairs(words[i], inverse_pair), sign = words[i] & signs;
    const NearestE2m1 low(__uint_as_float(y << 16), v, inverse_v),
        high(__uint_as_float(y & 0xFFFF0000u), v, inverse_v);
    const __nv_bfloat162 values = __floats2bfloat162_rn(low.value, high.value);
    operand[i] = multiply_pairs(reinterpret_cast<const uint32_t&>(values), v_pair) | sign;
    vec8.codes |= (low.code | high.code << 4 | (sign >> 12 & 0x8) | (sign >> 24 & 0x80)) << i * 8;
  }
  vec8.operand = make_uint4(operand[0], operand[1], operand[2], operand[3]);
  return vec8;
}

}  // namespace nvfp4_moe::internal::cuda
