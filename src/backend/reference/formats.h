// The number formats of the contract, by definition: a value is rounded to the nearest entry of a
// sorted table, or to the nearest multiple of its binade's quantum, ties to even.
//
// The reference shares no table and no rounding with core, so that a mistake there shows up as a
// difference. Nothing here is fast.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/dtype.h"

namespace nvfp4_moe::internal::reference {

inline constexpr int kBlock = 16;  // values that share a block scale

// ---- E2M1: sign, two exponent bits, one mantissa bit

inline constexpr std::array<double, 8> kE2m1Magnitudes = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

// Twice the value: an integer.
inline constexpr std::array<int16_t, 16> kE2m1Doubled = {0, 1,  2,  3,  4,  6,  8,  12,
                                                         0, -1, -2, -3, -4, -6, -8, -12};

// ---- E4M3, the non-negative half: 0x7F is NaN, the others ascend

constexpr double e4m3_magnitude(int byte) {
  const int exponent = byte >> 3, mantissa = byte & 7;
  double quantum = 1.0 / 512.0;  // of the subnormals and of exponent 1
  for (int e = 1; e < exponent; ++e) quantum *= 2;
  return (exponent == 0 ? mantissa : mantissa + 8) * quantum;
}
inline constexpr auto kE4m3Magnitudes = [] {
  std::array<double, 127> table{};
  for (int byte = 0; byte < 127; ++byte) table[static_cast<size_t>(byte)] = e4m3_magnitude(byte);
  return table;
}();
// 512 times the value: an integer. The NaN byte is refused when weights are packed, and never
// produced.
inline constexpr auto kE4m3Times512 = [] {
  std::array<int32_t, 128> table{};
  for (size_t byte = 0; byte < 127; ++byte)
    table[byte] = static_cast<int32_t>(kE4m3Magnitudes[byte] * 512);
  return table;
}();
static_assert(kE4m3Magnitudes[126] == 448 && kE4m3Magnitudes[1] * 512 == 1 &&
              kE4m3Magnitudes[0x38] == 1);

// Index of the entry nearest to magnitude >= 0. A tie goes to the even index; values beyond the
// last entry give the last one.
template <size_t kCount>
constexpr uint8_t nearest(const std::array<double, kCount>& table, double magnitude) {
  size_t low = 0, high = kCount - 1;
  if (magnitude >= table[high]) return static_cast<uint8_t>(high);
  while (high - low > 1) {  // table[low] <= magnitude < table[high]
    const size_t middle = (low + high) / 2;
    (table[middle] <= magnitude ? low : high) = middle;
  }
  // exact: neighbours differ by one quantum
  const double midpoint = (table[low] + table[high]) / 2;
  const bool up = magnitude > midpoint || (magnitude == midpoint && low % 2 == 1);
  return static_cast<uint8_t>(up ? high : low);
}

// NaN gives +6, as the hardware's conversion does; the sign of zero is kept.
inline uint8_t round_to_e2m1(double value) {
  if (std::isnan(value)) return 7;
  return static_cast<uint8_t>(nearest(kE2m1Magnitudes, std::fabs(value)) |
                              (std::signbit(value) ? 8 : 0));
}
// For block scales, which are never negative.
inline uint8_t round_to_e4m3(double value) { return nearest(kE4m3Magnitudes, value); }
// For a finite value, with its sign, including that of zero.
inline uint8_t round_to_signed_e4m3(double value) {
  return static_cast<uint8_t>(round_to_e4m3(std::fabs(value)) | (std::signbit(value) ? 128 : 0));
}

// ---- bf16, fp16, fp32

struct FloatFormat {
  int precision;     // significant bits, including the hidden one
  int min_exponent;  // of the smallest normal
  int max_exponent;
  int bits;
};
inline constexpr FloatFormat kBf16{8, -126, 127, 16};
inline constexpr FloatFormat kFp16{11, -14, 15, 16};
inline constexpr FloatFormat kFp32{24, -126, 127, 32};

inline const FloatFormat& format_of(DType dtype) {
  return dtype == DType::kBf16 ? kBf16 : dtype == DType::kF16 ? kFp16 : kFp32;
}

// The nearest value of the format; Inf beyond its range.
inline double round_to(const FloatFormat& format, double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), format.min_exponent) - (format.precision - 1);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
  if (std::fabs(rounded) >= std::ldexp(1.0, format.max_exponent + 1))
    return std::copysign(std::numeric_limits<double>::infinity(), value);
  return rounded;
}

// The bits of a value that the format holds exactly, or of NaN.
inline uint32_t bits_of(const FloatFormat& format, double value) {
  const int fraction_bits = format.precision - 1;
  const uint32_t sign = std::signbit(value) ? 1u << (format.bits - 1) : 0u;
  const uint32_t infinity = ((1u << (format.bits - 1)) - 1) >> fraction_bits << fraction_bits;
  if (std::isnan(value)) return infinity | 1u << (fraction_bits - 1);
  if (std::isinf(value)) return sign | infinity;
  if (value == 0) return sign;
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const auto significand =
      static_cast<uint32_t>(std::ldexp(std::fabs(value), fraction_bits - exponent));
  // A normal number's hidden bit adds the 1 by which its exponent field exceeds a subnormal's.
  return sign |
         ((static_cast<uint32_t>(exponent - format.min_exponent) << fraction_bits) + significand);
}

inline double value_of(const FloatFormat& format, uint32_t bits) {
  const int fraction_bits = format.precision - 1;
  const uint32_t fraction = bits & ((1u << fraction_bits) - 1);
  const uint32_t field = bits << 1 << (32 - format.bits) >> (33 - format.bits) >> fraction_bits;
  const double sign = bits >> (format.bits - 1) & 1u ? -1.0 : 1.0;
  if (field == static_cast<uint32_t>(format.max_exponent - format.min_exponent + 2))
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  if (field == 0) return sign * std::ldexp(fraction, format.min_exponent - fraction_bits);
  return sign * std::ldexp(fraction | 1u << fraction_bits,
                           static_cast<int>(field) - 1 + format.min_exponent - fraction_bits);
}

// bf16 is the upper half of an fp32. This conversion is used often enough to deserve a shortcut.
inline float bf16_value(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline uint16_t round_to_bf16(double value) {
  return static_cast<uint16_t>(bits_of(kBf16, round_to(kBf16, value)));
}

// Element i of an array of activations, converted exactly.
inline double load(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return dtype == DType::kBf16 ? double{bf16_value(bits)} : value_of(kFp16, bits);
}
// Stores a value with one rounding.
inline void store(void* data, DType dtype, int64_t i, double value) {
  const FloatFormat& format = format_of(dtype);
  const uint32_t bits = bits_of(format, round_to(format, value));
  if (dtype == DType::kF32)
    static_cast<float*>(data)[i] = std::bit_cast<float>(bits);
  else
    static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(bits);
}

}  // namespace nvfp4_moe::internal::reference
