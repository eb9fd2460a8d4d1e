// The single rounding of an exact GEMM accumulator.
//
// A W4A4 dot product is an integer multiple of 2^-20: each 16-block gives sum (2w)(2a), at most
// 2304, times two scales in multiples of 2^-9. 59.8 bits hold K = 131072. Multiplied with alpha, a
// float of 24 bits, it fits 128 bits, so the product is exact and the rounding here is the only
// one.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "backend/reference/formats.h"

namespace nvfp4_moe::internal::reference {

// For fp8 it is a multiple of 2^-18: products of two multiples of 2^-9 (dots.h).
inline constexpr int kAccumulatorExponent = -20;
inline constexpr int kFp8AccumulatorExponent = -18;

__extension__ using Int128 = __int128;
__extension__ using Uint128 = unsigned __int128;

inline int bit_width(Uint128 value) {
  const auto high = static_cast<uint64_t>(value >> 64);
  return high != 0 ? 64 + static_cast<int>(std::bit_width(high))
                   : static_cast<int>(std::bit_width(static_cast<uint64_t>(value)));
}

// Rounds value * 2^exponent to the nearest value of the format, ties to even; Inf beyond its range.
inline double round_exact(Int128 value, int exponent, const FloatFormat& format) {
  if (value == 0) return 0;
  const double sign = value < 0 ? -1 : 1;
  Uint128 magnitude = value < 0 ? -static_cast<Uint128>(value) : static_cast<Uint128>(value);
  const int leading = bit_width(magnitude) - 1 + exponent;
  const int quantum = std::max(leading, format.min_exponent) - (format.precision - 1);
  const int drop = quantum - exponent;  // low bits that do not fit into the format
  if (drop > 127) return sign * 0.0;    // below half of the smallest subnormal
  if (drop > 0) {
    const Uint128 rest = magnitude & ((Uint128{1} << drop) - 1), half = Uint128{1} << (drop - 1);
    magnitude >>= drop;
    if (rest > half || (rest == half && (magnitude & 1) != 0)) ++magnitude;
    exponent = quantum;
  }
  const double rounded = std::ldexp(static_cast<double>(magnitude), exponent);
  return sign * (rounded >= std::ldexp(1.0, format.max_exponent + 1)
                     ? std::numeric_limits<double>::infinity()
                     : rounded);
}

// accumulator * 2^accumulator_exponent * alpha, rounded once.
inline double scale_exact(int64_t accumulator, float alpha, const FloatFormat& format,
                          int accumulator_exponent = kAccumulatorExponent) {
  if (!std::isfinite(alpha)) return static_cast<double>(accumulator) * alpha;
  int exponent = 0;
  // 24 bits: exact
  const auto significand = static_cast<int64_t>(std::ldexp(std::frexp(alpha, &exponent), 24));
  return round_exact(Int128{accumulator} * significand, accumulator_exponent + exponent - 24,
                     format);
}

// The factor of an accumulator. It is computed in double, which holds the product of two floats and
// a power of two exactly, and rounded once.
inline float alpha_of(float row_scale, float tensor_scale, int shift = 0) {
  return static_cast<float>(std::ldexp(double{row_scale} * double{tensor_scale}, shift));
}

}  // namespace nvfp4_moe::internal::reference
