// Converts eight elements to E4M3 under a row scale s that is a power of two. x / s is exact or far
// below every boundary, so one conversion rounds once. sm_89 and later have an instruction for it;
// the bits are those of e4m3_from_float.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/arithmetic.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/quantize_vec8.cuh"

namespace nvfp4_moe::internal::cuda {

// Half of a block of 16.
struct E4m3Vec8 {
  uint32_t codes[2];  // elements 0..3 and 4..7, the first in the low byte
  // For the whole block of 16:
  bool saturated, zeroed;

  // x: finite. inverse = 1 / s. amax: the largest magnitude of the block of 16, as fp32 bits.
  __device__ static E4m3Vec8 of(const float (&x)[8], float inverse, uint32_t amax);
  // The same for eight bf16.
  __device__ static E4m3Vec8 of(const uint4& x, float inverse, uint32_t amax);
  // The same, called by a whole warp: the neighbouring lane has the other half of a block.
  __device__ static E4m3Vec8 of(const uint4& x, float inverse);
};

// The bytes of low and high, with signs of zero, in bits 0..7 and 8..15.
__device__ inline uint32_t e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  return ptx::e4m3x2(low, high);
#else
  const auto byte = [](float x) {
    return e4m3_from_float(fabsf(x)) | (__float_as_uint(x) >> 24 & 0x80u);
  };
  return byte(low) | byte(high) << 8;
#endif
}

__device__ inline E4m3Vec8 E4m3Vec8::of(const float (&x)[8], float inverse, uint32_t amax) {
  E4m3Vec8 vec8;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    vec8.codes[i] = e4m3_pair(x[4 * i] * inverse, x[4 * i + 1] * inverse) |
                    e4m3_pair(x[4 * i + 2] * inverse, x[4 * i + 3] * inverse) << 16;
  const float largest = __uint_as_float(amax) * inverse;
  vec8.saturated = largest > 448;
  // half of the smallest E4M3 is a tie, which goes to the even 0
  vec8.zeroed = amax != 0 && largest <= 0x1p-10f;
  return vec8;
}
__device__ inline E4m3Vec8 E4m3Vec8::of(const uint4& x, float inverse, uint32_t amax) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  float values[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
  return of(values, inverse, amax);
}
__device__ inline E4m3Vec8 E4m3Vec8::of(const uint4& x, float inverse) {
  uint32_t magnitudes = larger_magnitudes(x);
  magnitudes = __vmaxu2(magnitudes, __shfl_xor_sync(0xFFFFFFFFu, magnitudes, 1));
  return of(x, inverse, larger_half(magnitudes));
}

// The value of an E4M3 byte (not NaN) in bf16, exact.
__device__ inline uint32_t bf16_from_e4m3(uint32_t byte) {
  // also exact for subnormals of both formats
  const float value = __uint_as_float((byte & 0x7Fu) << 20) * 0x1p120f;
  return __float_as_uint(value) >> 16 | (byte & 0x80u) << 8;
}
// The same for four bytes.
__device__ inline uint2 bf16_from_e4m3x4(uint32_t codes) {
  const auto pair = [&](int i) {
    return bf16_from_e4m3(codes >> 8 * i & 0xFFu) | bf16_from_e4m3(codes >> (8 * i + 8) & 0xFFu)
                                                        << 16;
  };
  return make_uint2(pair(0), pair(2));
}

}  // namespace nvfp4_moe::internal::cuda
