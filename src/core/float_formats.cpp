// Bit-level conversions of bf16, fp16, E2M1 and E4M3.
//
// - Decoding reads a table.
// - Encoding works on magnitudes. E2M1 counts the rounding boundaries below |x|. The others add
//   half an ulp (less one, plus the parity of the kept bits) below the kept bits, and let one float
//   addition round subnormals.
// - Doubles become bf16 and fp16 through a float that is rounded to odd. That float has two or more
//   bits to spare, so rounding it to nearest even gives the same bits as rounding the double
//   directly.
#include "core/float_formats.h"

#include <array>
#include <cmath>

namespace nvfp4_moe::internal {
namespace {

constexpr std::array<float, 16> kE2m1Values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,
                                               4.0f,  6.0f,  -0.0f, -0.5f, -1.0f, -1.5f,
                                               -2.0f, -3.0f, -4.0f, -6.0f};

constexpr float e4m3_value(unsigned byte) {
  const unsigned exponent = (byte >> 3) & 15;
  const unsigned mantissa = byte & 7;
  float magnitude = 0;
  if ((byte & 0x7F) == kE4m3Nan) {
    magnitude = std::bit_cast<float>(0x7FC00000u);
  } else if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  } else {
    magnitude = std::bit_cast<float>(((exponent + 127 - 7) << 23) | (mantissa << 20));
  }
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
}

constexpr std::array<float, 256> kE4m3Values = [] {
  std::array<float, 256> values{};
  for (unsigned byte = 0; byte < 256; ++byte) values[byte] = e4m3_value(byte);
  return values;
}();

// The number of E2M1 rounding boundaries that |x| has passed. A boundary itself goes to the even
// neighbour.
template <class Float>
uint8_t e2m1_encode(Float value) {
  const Float a = std::fabs(value);
  if (std::isnan(value)) return 7;
  const int magnitude = (a > Float(0.25)) + (a >= Float(0.75)) + (a > Float(1.25)) +
                        (a >= Float(1.75)) + (a > Float(2.5)) + (a >= Float(3.5)) +
                        (a > Float(5.0));
  return static_cast<uint8_t>(magnitude | (std::signbit(value) ? 8 : 0));
}

// Rounds to odd: truncates, and sets the last bit if anything was lost.
float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const auto back = static_cast<double>(nearest);
  if (back == value || std::isnan(value)) return nearest;
  auto bits = std::bit_cast<uint32_t>(nearest);
  if (std::fabs(back) > std::fabs(value)) --bits;
  return std::bit_cast<float>(bits | 1u);
}

}  // namespace

uint16_t bf16_from_float(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t bf16_from_double(double value) { return bf16_from_float(round_to_odd(value)); }

float fp16_to_float(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u)
    return std::bit_cast<float>(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  if (magnitude < 0x400u) {  // subnormal: an integer of units 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
}

uint16_t fp16_from_float(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u)
    return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and above
  if (magnitude < 0x38800000u) {  // below 2^-14: units of 2^-24, rounded by the addition
    const float units = std::bit_cast<float>(magnitude) * 0x1p24f + 0x1p23f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(units) - 0x4B000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - ((127u - 15u) << 10)));
}

uint16_t fp16_from_double(double value) { return fp16_from_float(round_to_odd(value)); }

float e2m1_to_float(uint8_t code) { return kE2m1Values[code & 15]; }
uint8_t e2m1_from_float(float value) { return e2m1_encode(value); }
uint8_t e2m1_from_double(double value) { return e2m1_encode(value); }

float e4m3_to_float(uint8_t byte) { return kE4m3Values[byte]; }

uint8_t e4m3_from_float(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return kE4m3Nan;
  if (magnitude >= 0x43E00000u) return static_cast<uint8_t>(sign | 0x7Eu);  // 448 and above
  if (magnitude <
      0x3C800000u) {  // below 2^-6: units of 2^-9, rounded by the addition; 8 units are byte 0x08
    const float units = std::bit_cast<float>(magnitude) * 0x1p9f + 0x1p23f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(units) - 0x4B000000u));
  }
  const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - ((127u - 7u) << 3)));
}

uint8_t e4m3_from_double(double value) {
  const auto bits = std::bit_cast<uint64_t>(value);
  const auto sign = static_cast<uint32_t>(bits >> 56) & 0x80u;
  const uint64_t magnitude = bits & 0x7FFFFFFFFFFFFFFFu;
  const double a = std::bit_cast<double>(magnitude);
  if (std::isnan(a)) return kE4m3Nan;
  if (a >= 448.0) return static_cast<uint8_t>(sign | 0x7Eu);
  if (a < 0x1p-6) {
    const double units = a * 0x1p9 + 0x1p52;
    return static_cast<uint8_t>(
        sign | static_cast<uint32_t>(std::bit_cast<uint64_t>(units) - 0x4330000000000000u));
  }
  const uint64_t rounded = magnitude + 0xFFFFFFFFFFFFu + ((magnitude >> 49) & 1u);
  return static_cast<uint8_t>(sign | static_cast<uint32_t>((rounded >> 49) - ((1023u - 7u) << 3)));
}

}  // namespace nvfp4_moe::internal
