// Roundings that the C++ type system does not have. Compiled with -frounding-math.
#include "runtime/formats.h"

#include <algorithm>
#include <array>
#include <cfenv>
#include <cmath>

namespace ptxemu {
namespace {

// The host's rounding mode for as long as this lives.
class RoundingMode {
 public:
  explicit RoundingMode(Rounding mode) : before_(fegetround()) {
    static constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    fesetround(kModes[mode]);
  }
  ~RoundingMode() { fesetround(before_); }

 private:
  int before_;
};

// A small binary format, and the rounding of a magnitude to it.
struct Format {
  int mantissa_bits, bias;
  float largest;
};

// The code of |x| without its sign: to nearest, saturating. Ties go to even.
uint32_t magnitude_code(float x, const Format& format, bool ties_away) {
  const double magnitude =
      std::fmin(std::fabs(static_cast<double>(x)), static_cast<double>(format.largest));
  if (magnitude == 0) return 0;
  int exponent;
  std::frexp(magnitude, &exponent);
  const int least = 1 - format.bias;
  exponent = exponent - 1 < least ? least : exponent - 1;
  const double step = std::ldexp(1.0, exponent - format.mantissa_bits);
  double steps = ties_away ? std::floor(magnitude / step + 0.5) : std::nearbyint(magnitude / step);
  const double largest_steps = format.largest / step;
  if (steps > largest_steps) steps = largest_steps;
  // Above `least`, the leading one of `steps` adds one to the exponent's field; a carry to the next
  // power does so again.
  return static_cast<uint32_t>(steps) +
         (static_cast<uint32_t>(exponent - least) << format.mantissa_bits);
}

uint32_t with_sign(uint32_t code, float x, int at) { return code | float_bits(x) >> 31 << at; }

// A double to a float, so that a second rounding to fewer bits is right: what is cut sets the last
// bit.
float to_odd(double x) {
  const float rounded = static_cast<float>(x);
  if (static_cast<double>(rounded) == x || rounded != rounded || std::isinf(x)) return rounded;
  uint32_t bits = float_bits(rounded);
  if (std::fabs(static_cast<double>(rounded)) > std::fabs(x)) --bits;
  return as_float(bits | 1);
}

}  // namespace

float add_directed(float a, float b, Rounding mode) {
  const RoundingMode scope(mode);
  const volatile float x = a, y = b;
  const volatile float sum = x + y;
  return sum;
}
float sub_directed(float a, float b, Rounding mode) { return add_directed(a, -b, mode); }
float mul_directed(float a, float b, Rounding mode) {
  const RoundingMode scope(mode);
  const volatile float x = a, y = b;
  const volatile float product = x * y;
  return product;
}
float fma_directed(float a, float b, float c, Rounding mode) {
  const RoundingMode scope(mode);
  const volatile float x = a, y = b, z = c;
  const volatile float result = __builtin_fmaf(x, y, z);
  return result;
}
float float_from_double(double x, Rounding mode) {
  if (planted(Fault::cvt_f32_rz) && mode == kToZero) mode = kNearest;
  const RoundingMode scope(mode);
  const volatile double from = x;
  const volatile float result = static_cast<float>(from);
  return result;
}

uint16_t f16_from_float(float x, Rounding mode, bool finite) {
  if (planted(Fault::f16_overflow)) finite = true;
  const uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude == 0x7f800000u) return static_cast<uint16_t>(sign | (finite ? 0x7bffu : 0x7c00u));
  const Format format{
      10, 15,
      131008.0f};  // a step above the largest finite value's binade stays representable here
  uint32_t code;
  if (mode == kToZero) {
    // Cutting is rounding to nearest of a value that was cut before.
    const double exponent_floor = std::ldexp(1.0, -24);
    int exponent;
    std::frexp(std::fabs(static_cast<double>(x)), &exponent);
    const double step = exponent - 1 < -14 ? exponent_floor : std::ldexp(1.0, exponent - 11);
    const double cut = std::floor(std::fabs(static_cast<double>(x)) / step) * step;
    code = cut > 65504.0 ? 0x7bffu : magnitude_code(static_cast<float>(cut), format, false);
  } else {
    code = magnitude_code(x, format, false);
    if (code > 0x7bffu) code = finite ? 0x7bffu : 0x7c00u;
  }
  if (planted(Fault::f16_subnormal) && code < 0x400u) code = 0;
  return static_cast<uint16_t>(sign | code);
}

uint16_t bf16_from_float(float x, Rounding mode, bool finite) {
  const uint32_t bits = float_bits(x);
  if (is_nan_bits(bits)) return 0x7fff;
  if (planted(Fault::bf16_truncates)) mode = kToZero;
  const uint32_t rounded = mode == kToZero ? bits : bits + 0x7fffu + (bits >> 16 & 1);
  const uint32_t code = rounded >> 16;
  if (finite && (code & 0x7fffu) == 0x7f80u)
    return static_cast<uint16_t>((code & 0x8000u) | 0x7f7fu);
  return static_cast<uint16_t>(code);
}

uint16_t f16_from_double(double x) { return f16_from_float(to_odd(x), kNearest, false); }
uint16_t bf16_from_double(double x) { return bf16_from_float(to_odd(x), kNearest, false); }

double fma_to_odd(double a, double b, double c) {
  const double product = a * b;  // exact: halves have at most 11 bits
  const double sum = product + c, back = sum - product;
  const double lost = (product - (sum - back)) + (c - back);
  if (lost == 0 || lost != lost || std::isinf(sum)) return sum;
  uint64_t bits = double_bits(sum);
  if ((lost < 0) == (sum > 0)) --bits;  // towards zero first
  return as_double(bits | 1);
}

float float_from_f16(uint16_t x) {
  const uint32_t exponent = x >> 10 & 31u, mantissa = x & 1023u,
                 sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  if (exponent == 31) return as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return as_float(sign | float_bits(static_cast<float>(mantissa) * 0x1p-24f));
  return as_float(sign | (exponent + 112u) << 23 | mantissa << 13);
}

uint8_t e4m3_from_float(float x) {
  if (x != x || (planted(Fault::e4m3_overflow) && std::fabs(x) > 464.0f)) return 0x7f;
  return static_cast<uint8_t>(
      with_sign(magnitude_code(x, {3, 7, 448.0f}, planted(Fault::e4m3_tie)), x, 7));
}
uint8_t e5m2_from_float(float x) {
  return x != x
             ? 0x7f
             : static_cast<uint8_t>(with_sign(magnitude_code(x, {2, 15, 57344.0f}, false), x, 7));
}
uint8_t e2m1_from_float(float x) {
  return x != x ? 7
                : static_cast<uint8_t>(
                      with_sign(magnitude_code(x, {1, 1, 6.0f}, planted(Fault::e2m1_tie)), x, 3));
}

// A power of two: the exponent of |x| rounded down or up, from 2^-127 to 2^127.
uint8_t ue8m0_from_float(float x, Rounding mode, bool finite) {
  const uint32_t bits = float_bits(x) & 0x7fffffffu;
  if (bits > 0x7f800000u) return 255;
  if (bits == 0x7f800000u) return finite ? 254 : 255;
  if (planted(Fault::ue8m0_rounds)) mode = kToZero;
  const uint32_t exponent = bits >> 23;
  if (exponent == 0) return mode == kUp && bits > 0x00400000u ? 1 : 0;
  const bool above = mode == kUp && (bits & 0x7fffffu) != 0;
  return static_cast<uint8_t>(exponent + above > 254 ? (finite ? 254 : 255) : exponent + above);
}

namespace {

// Values of the codes of a format without infinities, computed before the first kernel runs.
template <size_t kCodes>
std::array<float, kCodes> values_of(int mantissa_bits, int bias) {
  std::array<float, kCodes> values;
  for (uint32_t x = 0; x < kCodes; ++x) {
    const uint32_t magnitude = x & (kCodes / 2 - 1);
    const int exponent = static_cast<int>(magnitude >> mantissa_bits);
    const uint32_t mantissa = magnitude & ((1u << mantissa_bits) - 1);
    const float steps = static_cast<float>(exponent ? mantissa | 1u << mantissa_bits : mantissa);
    const float value = std::ldexp(steps, std::max(exponent, 1) - bias - mantissa_bits);
    values[x] = x == magnitude ? value : -value;
  }
  return values;
}
const std::array<float, 256> kE4m3Values = [] {
  auto values = values_of<256>(3, 7);
  values[0x7f] = values[0xff] = as_float(0x7fffffffu);
  return values;
}();
const std::array<float, 64> kE2m3Values = values_of<64>(3, 1), kE3m2Values = values_of<64>(2, 3);

}  // namespace

float float_from_e4m3(uint32_t x) { return kE4m3Values[x & 255]; }
float float_from_e2m3(uint32_t x) { return kE2m3Values[x & 63]; }
float float_from_e3m2(uint32_t x) { return kE3m2Values[x & 63]; }
float float_from_e5m2(uint32_t x) {
  return float_from_f16(static_cast<uint16_t>((x & 0xffu) << 8));
}
float float_from_e2m1(uint32_t x) {
  static constexpr float kValues[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return x & 8u ? -kValues[x & 7u] : kValues[x & 7u];
}

float float_from_small(Small type, uint32_t code) {
  switch (type) {
    case Small::kE4M3: return float_from_e4m3(code);
    case Small::kE5M2: return float_from_e5m2(code);
    case Small::kE2M3:
      return planted(Fault::e2m3_exponent) ? float_from_e3m2(code) : float_from_e2m3(code);
    case Small::kE3M2: return float_from_e3m2(code);
    default: return float_from_e2m1(code);
  }
}

}  // namespace ptxemu
