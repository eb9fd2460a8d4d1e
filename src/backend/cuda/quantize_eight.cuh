// Eight bf16 elements to NVFP4, two in an instruction, where the line's scale s is a power of two.
//
// Magnitudes are compared as integers, which order as bf16 does. y = x / s is exact or far below every boundary, and a
// boundary of e2m1 times the block's e4m3 has 7 significant bits, so that it is bf16 too: the codes are those of
// quantize_block.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "backend/cuda/formats.cuh"

namespace nvfp4_moe::cuda {

// Half of a block of 16.
struct Eight {
  uint32_t codes;  // a nibble each
  uint4 operand;   // e2m1 * e4m3 in bf16
  // Of the whole block:
  uint32_t scale;  // the e4m3 byte
  bool saturated, zeroed;
};

__device__ inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product =
      __hmul2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}
// The magnitudes of eight elements, the larger ones of two each time.
__device__ inline uint32_t larger_magnitudes(const uint4& x) {
  constexpr uint32_t kMagnitudes = 0x7FFF7FFFu;
  return __vmaxu2(__vmaxu2(x.x & kMagnitudes, x.y & kMagnitudes), __vmaxu2(x.z & kMagnitudes, x.w & kMagnitudes));
}
// The larger of two magnitudes in bf16, as fp32's bits.
__device__ inline uint32_t larger_half(uint32_t pair) { return max(pair << 16, pair & 0xFFFF0000u); }

// inverse = 1 / s. A whole warp: a block's other half is that of the lane beside.
__device__ inline Eight quantize_eight(const uint4& x, float inverse) {
  constexpr uint32_t kSigns = 0x80008000u, kOne = 0x00010001u;
  uint32_t magnitudes = larger_magnitudes(x);
  magnitudes = __vmaxu2(magnitudes, __shfl_xor_sync(0xFFFFFFFFu, magnitudes, 1));
  const uint32_t amax = larger_half(magnitudes);
  const float scale = (__uint_as_float(amax) * inverse) * (1.0f / 6.0f);
  Eight eight;
  eight.scale = e4m3_from_float(scale);
  eight.saturated = scale > 448;
  eight.zeroed = eight.scale == 0 && amax != 0;

  const uint32_t v = __byte_perm(__float_as_uint(e4m3_to_float(eight.scale)), 0, 0x3232);
  const uint32_t of_boundaries = eight.scale != 0 ? v : 0x7F007F00u;  // a block of scale 0 reaches none
  // What a magnitude must reach for each code from 1 on. A tie goes to the even code: up to the even ones, and for the
  // odd ones the boundary itself is not enough.
  const uint32_t least[7] = {multiply_pairs(of_boundaries, 0x3E803E80u) + kOne,   // 0.25
                             multiply_pairs(of_boundaries, 0x3F403F40u),          // 0.75
                             multiply_pairs(of_boundaries, 0x3FA03FA0u) + kOne,   // 1.25
                             multiply_pairs(of_boundaries, 0x3FE03FE0u),          // 1.75
                             multiply_pairs(of_boundaries, 0x40204020u) + kOne,   // 2.5
                             multiply_pairs(of_boundaries, 0x40604060u),          // 3.5
                             multiply_pairs(of_boundaries, 0x40A040A0u) + kOne};  // 5
  // e2m1's magnitudes times v: the low bytes of codes 0..3 and 4..7, the high bytes.
  const uint32_t values[4] = {multiply_pairs(v, 0x3F000000u), multiply_pairs(v, 0x3FC03F80u),
                              multiply_pairs(v, 0x40404000u), multiply_pairs(v, 0x40C04080u)};
  const uint32_t low[2] = {__byte_perm(values[0], values[1], 0x6420), __byte_perm(values[2], values[3], 0x6420)};
  const uint32_t high[2] = {__byte_perm(values[0], values[1], 0x7531), __byte_perm(values[2], values[3], 0x7531)};

  const uint32_t signs = eight.scale != 0 ? kSigns : 0;
  const uint32_t inverse_pair = __byte_perm(__float_as_uint(inverse), 0, 0x3232);
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  uint32_t operand[4];
  eight.codes = 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t two[2];  // of each pair, bits 15..12 of a half: the code
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t y = multiply_pairs(words[i + j], inverse_pair) | kSigns;
      uint32_t reached[7];  // in a half's bit 15; with it set no half borrows from the other
#pragma unroll
      for (int c = 0; c < 7; ++c) reached[c] = y - least[c];
      const uint32_t bit1 = reached[1] ^ reached[3] ^ reached[5];
      const uint32_t bit0 = reached[0] ^ reached[1] ^ reached[2] ^ reached[3] ^ reached[4] ^ reached[5] ^ reached[6];
      two[j] = (words[i + j] & signs) | (reached[3] >> 1 & 0x40004000u) | (bit1 >> 2 & 0x20002000u) |
               (bit0 >> 3 & 0x10001000u);
    }
    // Nibbles 0..3 of the low half: elements 0, 2 lie 8 bits apart in it, 1 and 3 in the high half.
    uint32_t four = two[0] >> 12 | two[1] >> 4;
    four = (four | four >> 12) & 0xFFFFu;
    eight.codes |= four << i * 8;
    const uint32_t select = four & 0x7777u;
    const uint32_t low_bytes = __byte_perm(low[0], low[1], select), high_bytes = __byte_perm(high[0], high[1], select);
    operand[i] = __byte_perm(low_bytes, high_bytes, 0x5140) | (words[i] & signs);
    operand[i + 1] = __byte_perm(low_bytes, high_bytes, 0x7362) | (words[i + 1] & signs);
  }
  eight.operand = make_uint4(operand[0], operand[1], operand[2], operand[3]);
  return eight;
}

}  // namespace nvfp4_moe::cuda
