// f32 and f64 arithmetic as PTX defines it: NaN results are 0x7fffffff, .ftz, directed roundings,
// minimum and maximum.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "runtime/bits.h"

namespace ptxemu {

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline double as_double(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}
inline uint64_t double_bits(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, 8);
  return bits;
}
inline bool is_nan_bits(uint32_t x) { return (x & 0x7fffffffu) > 0x7f800000u; }
inline uint32_t canonical_nan(uint32_t x) {
  return is_nan_bits(x) && !planted(Fault::nan_kept) ? 0x7fffffffu : x;
}
inline uint32_t flush_subnormal(uint32_t x) {
  if (planted(Fault::ftz_ignored)) return x;
  return (x & 0x7f800000u) == 0 ? x & 0x80000000u : x;
}
// To [0, 1]; NaN becomes 0.
inline uint32_t saturate_unit(uint32_t x) {
  const float value = as_float(x);
  return !(value > 0) ? 0 : value >= 1 ? 0x3f800000u : x;
}
inline float relu(float x) { return x != x ? as_float(0x7fffffffu) : x > 0 ? x : 0.0f; }

template <class F>
inline bool either_nan(F a, F b) {
  return a != a || b != b;
}
template <class F>
inline bool ordered_unequal(F a, F b) {
  if (planted(Fault::setp_unordered)) return a != b;
  return a < b || a > b;
}

// -0 is below +0. A NaN loses against a number.
inline float minimum_number(float a, float b) {
  if (planted(Fault::min_nan) && either_nan(a, b)) return as_float(0x7fffffffu);
  if (a != a) return b;
  if (b != b) return a;
  return a == b ? as_float(float_bits(a) | float_bits(b)) : a < b ? a : b;
}
inline float maximum_number(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  return a == b ? as_float(float_bits(a) & float_bits(b)) : a > b ? a : b;
}
inline float minimum_nan(float a, float b) {
  return either_nan(a, b) ? as_float(0x7fffffffu) : minimum_number(a, b);
}
inline float maximum_nan(float a, float b) {
  return either_nan(a, b) ? as_float(0x7fffffffu) : maximum_number(a, b);
}
inline double minimum_double(double a, double b) {
  return a != a ? b : b != b ? a : a == b ? (__builtin_signbit(a) ? a : b) : a < b ? a : b;
}
inline double maximum_double(double a, double b) {
  return a != a ? b : b != b ? a : a == b ? (__builtin_signbit(a) ? b : a) : a > b ? a : b;
}
template <class F>
inline uint32_t xorsign_abs(F choice, float a, float b) {
  const uint32_t sign = (float_bits(a) ^ float_bits(b)) & 0x80000000u;
  const float chosen =
      choice(as_float(float_bits(a) & 0x7fffffffu), as_float(float_bits(b) & 0x7fffffffu));
  return is_nan_bits(float_bits(chosen)) ? 0x7fffffffu : float_bits(chosen) | sign;
}

inline bool test_finite(uint32_t x) { return (x & 0x7f800000u) != 0x7f800000u; }
inline bool test_infinite(uint32_t x) { return (x & 0x7fffffffu) == 0x7f800000u; }
inline bool test_number(uint32_t x) { return !is_nan_bits(x); }
inline bool test_notanumber(uint32_t x) { return is_nan_bits(x); }
inline bool test_normal(uint32_t x) { return test_finite(x) && (x & 0x7f800000u) != 0; }
inline bool test_subnormal(uint32_t x) { return (x & 0x7f800000u) == 0 && (x & 0x007fffffu) != 0; }

#define PTXEMU_PAIR(name, result)                                                 \
  inline uint64_t name(uint64_t a, uint64_t b, [[maybe_unused]] uint64_t c = 0) { \
    uint32_t half[2];                                                             \
    for (int i = 0; i < 64; i += 32) {                                            \
      const float x = as_float(static_cast<uint32_t>(a >> i)),                    \
                  y = as_float(static_cast<uint32_t>(b >> i));                    \
      [[maybe_unused]] const float z = as_float(static_cast<uint32_t>(c >> i));   \
      half[i / 32] = canonical_nan(float_bits(result));                           \
    }                                                                             \
    return pair_of_words(half[0], half[1]);                                       \
  }
PTXEMU_PAIR(add_f32x2, x + y)
PTXEMU_PAIR(sub_f32x2, x - y)
PTXEMU_PAIR(mul_f32x2, x* y)
PTXEMU_PAIR(fma_f32x2, __builtin_fmaf(x, y, z))
#undef PTXEMU_PAIR

// ---- roundings other than to nearest
enum Rounding { kNearest, kToZero, kDown, kUp };
float add_directed(float a, float b, Rounding mode);
float sub_directed(float a, float b, Rounding mode);
float mul_directed(float a, float b, Rounding mode);
float fma_directed(float a, float b, float c, Rounding mode);
float float_from_double(double x, Rounding mode);

template <class T>
inline float float_from_integer(T x, Rounding mode) {
  const float nearest = static_cast<float>(x);
  // both are exact
  const long double error = static_cast<long double>(nearest) - static_cast<long double>(x);
  if (mode == kNearest || error == 0) return nearest;
  const bool lower = mode == kDown || (mode == kToZero && x > 0);
  if (lower) return error > 0 ? __builtin_nextafterf(nearest, -__builtin_inff()) : nearest;
  return error < 0 ? __builtin_nextafterf(nearest, __builtin_inff()) : nearest;
}
inline double round_to_integer(double x, Rounding mode) {
  if (planted(Fault::cvt_rzi_nearest) && mode == kToZero) mode = kNearest;
  return mode == kNearest  ? __builtin_nearbyint(x)
         : mode == kToZero ? __builtin_trunc(x)
         : mode == kDown   ? __builtin_floor(x)
                           : __builtin_ceil(x);
}
template <class T>
inline T integer_from_double(double x, Rounding mode, bool nan_is_top_bit) {
  using Limits = std::numeric_limits<T>;
  if (x != x && !planted(Fault::cvt_nan_integer))
    return nan_is_top_bit ? static_cast<T>(std::make_unsigned_t<T>(1) << (sizeof(T) * 8 - 1))
                          : T(0);
  const double rounded = round_to_integer(x, mode);
  if (rounded <= static_cast<double>(Limits::min())) return Limits::min();
  // 2^63 - 1 becomes 2^63 as a double, so that what is below it fits.
  return rounded < static_cast<double>(Limits::max()) ? static_cast<T>(rounded) : Limits::max();
}

}  // namespace ptxemu
