// bf16, fp16, E2M1 and E4M3 as bit patterns: one rounding, to nearest even, from float or from
// double.
//
// Narrowing from double rounds once from the double (never double -> float -> narrow).
//
// - E2M1: sign, 2 exponent bits, 1 mantissa bit. Magnitudes 0 0.5 1 1.5 2 3 4 6; no Inf, no NaN.
//   Saturates at 6. NaN -> 0x7 (+6), as cvt.rn.satfinite.e2m1x2 and cuda_fp4.h do. -0 and negatives
//   that underflow -> 0x8.
// - E4M3: OCP FP8 E4M3 "fn": max 448, NaN 0x7F/0xFF, no Inf. Saturates at 448. NaN -> 0x7F with the
//   sign dropped.
#pragma once

#include <bit>
#include <cstdint>

namespace nvfp4_moe::internal {

inline constexpr float kE2m1Max = 6.0f;
inline constexpr float kE4m3Max = 448.0f;
// kE2m1Max * kE4m3Max: the largest |value| that a tensor scale of 1 represents
inline constexpr double kNvfp4Range = 2688.0;
inline constexpr int kBlockElems = 16;  // elements along K that share one block scale
inline constexpr uint8_t kE4m3Nan = 0x7F;

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
uint16_t bf16_from_float(float value);    // NaN stays NaN (quiet)
uint16_t bf16_from_double(double value);  // one rounding
float fp16_to_float(uint16_t bits);
uint16_t fp16_from_float(float value);    // overflow to Inf
uint16_t fp16_from_double(double value);  // one rounding

float e2m1_to_float(uint8_t code);  // code 0..15; higher bits are ignored
uint8_t e2m1_from_float(float value);
uint8_t e2m1_from_double(double value);

float e4m3_to_float(uint8_t byte);  // all 256 bytes; 0x7F and 0xFF give NaN
uint8_t e4m3_from_float(float value);
uint8_t e4m3_from_double(double value);

// A block scale byte is valid iff its sign bit is 0 and it is not NaN.
constexpr bool is_valid_block_scale(uint8_t byte) { return byte < kE4m3Nan; }

// Two codes per byte: the even element along K in the low nibble.
constexpr uint8_t pack_codes(uint8_t even, uint8_t odd) {
  return static_cast<uint8_t>((even & 15) | (odd << 4));
}
constexpr uint8_t low_code(uint8_t byte) { return byte & 15; }
constexpr uint8_t high_code(uint8_t byte) { return byte >> 4; }

}  // namespace nvfp4_moe::internal
