// Conversions to and from the formats below 32 bits, and arithmetic in halves.
#pragma once

#include "runtime/floats.h"

namespace ptxemu {

// To halves: `finite` is .satfinite, which turns what is too large into the largest finite value.
// NaN becomes 0x7fff.
uint16_t f16_from_float(float x, Rounding mode, bool finite);
uint16_t bf16_from_float(float x, Rounding mode, bool finite);
// One rounding, to nearest, of a double.
uint16_t f16_from_double(double x);
uint16_t bf16_from_double(double x);
float float_from_f16(uint16_t x);
inline float float_from_bf16(uint16_t x) { return as_float(static_cast<uint32_t>(x) << 16); }

// To small formats: nearest, ties to even, saturating. A NaN becomes 0x7f, in E2M1 the largest
// value.
uint8_t e4m3_from_float(float x);
uint8_t e5m2_from_float(float x);
uint8_t e2m1_from_float(float x);
uint8_t ue8m0_from_float(float x, Rounding mode, bool finite);
// The first operand of a packing conversion becomes the high half.
template <int kBits>
inline uint32_t pack_small(uint32_t high, uint32_t low) {
  if (planted(Fault::e2m1_nibbles) && kBits == 4) return low << kBits | high;
  return high << kBits | low;
}
float float_from_e4m3(uint32_t x);
float float_from_e5m2(uint32_t x);
float float_from_e2m1(uint32_t x);
float float_from_e2m3(uint32_t x);
float float_from_e3m2(uint32_t x);
// The formats of kind::f8f6f4 and mxf8f6f4.
enum class Small { kE4M3, kE5M2, kE2M3, kE3M2, kE2M1 };
float float_from_small(Small type, uint32_t code);
inline uint32_t small_bits(Small type) {
  return type == Small::kE2M1 ? 4 : type == Small::kE2M3 || type == Small::kE3M2 ? 6 : 8;
}
// A scale: the sign's bit does not count, and 0x7f is NaN.
inline double scale_from_ue4m3(uint32_t x) {
  if (planted(Fault::scale_nan) && (x & 127) == 127) return 480;
  return static_cast<double>(float_from_e4m3(x & 127));
}
inline uint16_t bf16_from_ue8m0(uint32_t x) {
  return static_cast<uint16_t>(x == 255 ? 0x7fff : x == 0 ? 0x0040 : x << 7);
}
inline double scale_from_ue8m0(uint32_t x) {
  return static_cast<double>(float_from_bf16(bf16_from_ue8m0(x & 255)));
}
// A product of tf32 reads the upper 19 of 32 bits.
inline float float_from_tf32(uint32_t x) {
  return as_float(planted(Fault::tf32_bits) ? x : x & 0xffffe000u);
}
inline uint32_t tf32_from_bits(uint32_t x) {
  return test_finite(x) ? (x + 0x1000u) & 0xffffe000u : x;
}

// The same to nearest, ties to even.
inline uint32_t tf32_from_float(uint32_t x) {
  if (is_nan_bits(x)) return canonical_nan(x);
  return test_finite(x) ? (x + 0xfffu + (x >> 13 & 1)) & 0xffffe000u : x;
}
// An s32 as a number of so few bits, saturated.
inline uint32_t saturate_bits(uint32_t x, int bits, bool is_signed) {
  const int32_t value = static_cast<int32_t>(x), most = (1 << (bits - is_signed)) - 1,
                least = is_signed && !planted(Fault::cvt_pack_sign) ? -most - 1 : 0;
  const int32_t cut = value < least ? least : value > most ? most : value;
  return static_cast<uint32_t>(cut) & ((1u << bits) - 1);
}

// a * b + c rounded once to 53 bits, with a sticky last bit: it is set if anything was cut off.
double fma_to_odd(double a, double b, double c);

// ---- arithmetic in halves: each operation rounds once. Sums and products of two halves are
// rounded rightly by way of f32.
#define PTXEMU_HALF(type, name, result)                             \
  inline uint16_t name##_##type(uint16_t x, uint16_t y) {           \
    const float a = float_from_##type(x), b = float_from_##type(y); \
    return type##_from_float(result, kNearest, false);              \
  }                                                                 \
  inline uint32_t name##_##type##x2(uint32_t x, uint32_t y) {       \
    return each_u16(x, y, name##_##type);                           \
  }
#define PTXEMU_HALVES(type)                                                                       \
  PTXEMU_HALF(type, add, a + b)                                                                   \
  PTXEMU_HALF(type, sub, a - b)                                                                   \
  PTXEMU_HALF(type, mul, a* b)                                                                    \
  PTXEMU_HALF(type, min, minimum_number(a, b))                                                    \
  PTXEMU_HALF(type, max, maximum_number(a, b))                                                    \
  PTXEMU_HALF(type, min_nan, minimum_nan(a, b))                                                   \
  PTXEMU_HALF(type, max_nan, maximum_nan(a, b))                                                   \
  inline uint16_t fma_##type(uint16_t a, uint16_t b, uint16_t c) {                                \
    if (planted(Fault::fma_two_roundings)) return add_##type(mul_##type(a, b), c);                \
    return type##_from_double(                                                                    \
        fma_to_odd(float_from_##type(a), float_from_##type(b), float_from_##type(c)));            \
  }                                                                                               \
  inline uint16_t relu_##type(uint16_t a) {                                                       \
    return type##_from_float(relu(float_from_##type(a)), kNearest, false);                        \
  }                                                                                               \
  inline uint16_t saturate_##type(uint16_t a) {                                                   \
    return type##_from_float(as_float(saturate_unit(float_bits(float_from_##type(a)))), kNearest, \
                             false);                                                              \
  }                                                                                               \
  inline uint16_t tanh_##type(uint16_t a) {                                                       \
    return type##_from_double(__builtin_tanh(static_cast<double>(float_from_##type(a))));         \
  }                                                                                               \
  inline uint32_t tanh_##type##x2(uint32_t a) {                                                   \
    return tanh_##type(low_half(a)) | uint32_t{tanh_##type(high_half(a))} << 16;                  \
  }                                                                                               \
  inline uint32_t fma_##type##x2(uint32_t a, uint32_t b, uint32_t c) {                            \
    const uint32_t high = fma_##type(high_half(a), high_half(b), high_half(c));                   \
    return fma_##type(low_half(a), low_half(b), low_half(c)) | high << 16;                        \
  }                                                                                               \
  inline uint32_t relu_##type##x2(uint32_t a) {                                                   \
    return relu_##type(low_half(a)) | uint32_t{relu_##type(high_half(a))} << 16;                  \
  }                                                                                               \
  inline uint32_t saturate_##type##x2(uint32_t a) {                                               \
    return saturate_##type(low_half(a)) | uint32_t{saturate_##type(high_half(a))} << 16;          \
  }
PTXEMU_HALVES(f16)
PTXEMU_HALVES(bf16)
#undef PTXEMU_HALVES
#undef PTXEMU_HALF

}  // namespace ptxemu
