// The number formats of the contract on the device: one rounding each, to nearest even, as in
// core/float_formats.h.
//
// Compiled with -fmad=false, so that only the roundings written in the code take place.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/status.h"

namespace nvfp4_moe::internal::cuda {

inline constexpr uint32_t kInfBits = 0x7F800000u;

__device__ inline uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
__device__ inline float bf16_to_float(uint16_t bits) {
  return __uint_as_float(uint32_t{bits} << 16);
}
__device__ inline uint16_t bf16_from_float(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// The E4M3 byte of x >= 0, saturated at 448.
__device__ inline uint32_t e4m3_from_float(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (bits >= 0x43E00000u) return 0x7E;  // 448 and above
  // Below 2^-6 the addition rounds to multiples of 2^-9. Eight of them give byte 0x08, the smallest
  // normal number.
  if (bits < 0x3C800000u) return __float_as_uint(x * 0x1p9f + 0x1p23f) - 0x4B000000u;
  return ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - ((127u - 7u) << 3);
}
__device__ inline float e4m3_to_float(uint32_t byte) {
  if (byte < 8) return static_cast<float>(byte) * 0x1p-9f;
  return __uint_as_float((byte + ((127u - 7u) << 3)) << 20);
}

// The boundaries between adjacent e2m1 values, times `scale`. `scale` has at most 4 significant
// bits, so all are exact. Ties go to the even code.
struct E2m1Boundaries {
  float at[7];
  __device__ explicit E2m1Boundaries(float scale)
      : at{0.25f * scale, 0.75f * scale, 1.25f * scale, 1.75f * scale,
           2.5f * scale,  3.5f * scale,  5.0f * scale} {}
  // Saturates at 6; keeps the sign of zero.
  __device__ uint32_t code(float x) const {
    const float a = fabsf(x);
    const uint32_t magnitude = (a > at[0]) + (a >= at[1]) + (a > at[2]) + (a >= at[3]) +
                               (a > at[4]) + (a >= at[5]) + (a > at[6]);
    return magnitude | (__float_as_uint(x) >> 28 & 8u);
  }
};
__device__ inline float e2m1_to_float(uint32_t code) {
  // s e e m: exponents 1..3 are 2^0..2^2; exponent 0 is m / 2.
  const uint32_t magnitude = code & 7;
  const float value =
      magnitude < 2 ? static_cast<float>(magnitude) * 0.5f
                    : __uint_as_float((126u + (magnitude >> 1)) << 23 | (magnitude & 1) << 22);
  return (code & 8) != 0 ? -value : value;
}

// Element i of an array of an activation dtype, converted exactly.
template <DType kType>
__device__ inline float load_element(const void* data, int64_t i) {
  if constexpr (kType == DType::kF32) return static_cast<const float*>(data)[i];
  if constexpr (kType == DType::kF16) return __half2float(static_cast<const __half*>(data)[i]);
  return bf16_to_float(static_cast<const uint16_t*>(data)[i]);
}
// Elements [first, first + kCount) of a 16-byte aligned array; kCount is 4, 8 or 16, and first a
// multiple of it.
template <DType kType, int kCount>
__device__ inline void load_aligned(const void* data, int64_t first, float (&x)[kCount]) {
  constexpr int kBytes = kCount * (kType == DType::kF32 ? 4 : 2), kVector = kBytes < 16 ? 8 : 16;
  uint32_t words[kBytes / 4];
  const auto* const from = static_cast<const uint8_t*>(data) + first * (kBytes / kCount);
#pragma unroll
  for (int i = 0; i < kBytes / kVector; ++i)
    if constexpr (kVector == 16) {
      const uint4 vector = reinterpret_cast<const uint4*>(from)[i];
      words[i * 4] = vector.x, words[i * 4 + 1] = vector.y, words[i * 4 + 2] = vector.z,
                words[i * 4 + 3] = vector.w;
    } else {
      const uint2 vector = reinterpret_cast<const uint2*>(from)[i];
      words[i * 2] = vector.x, words[i * 2 + 1] = vector.y;
    }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kType == DType::kF32) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const auto half = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
      x[i] = kType == DType::kF16 ? __half2float(__ushort_as_half(half)) : bf16_to_float(half);
    }
  }
}
// The same for an array in which only elements are aligned.
template <DType kType, int kCount>
__device__ inline void load_elements(const void* data, int64_t first, float (&x)[kCount]) {
  if (reinterpret_cast<uintptr_t>(data) % 16 == 0) return load_aligned<kType>(data, first, x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = load_element<kType>(data, first + i);
}
// Stores x with one rounding.
template <DType kType>
__device__ inline void store_element(void* data, int64_t i, float x) {
  if constexpr (kType == DType::kF32)
    static_cast<float*>(data)[i] = x;
  else if constexpr (kType == DType::kF16)
    static_cast<__half*>(data)[i] = __float2half_rn(x);
  else
    static_cast<uint16_t*>(data)[i] = bf16_from_float(x);
}

// Calls go with out's dtype as a compile-time constant.
template <class Launch>
Status with_dtype(DType dtype, const Launch& go) {
  switch (dtype) {
    case DType::kF32: return go(std::integral_constant<DType, DType::kF32>());
    case DType::kF16: return go(std::integral_constant<DType, DType::kF16>());
    default: return go(std::integral_constant<DType, DType::kBf16>());
  }
}

}  // namespace nvfp4_moe::internal::cuda
