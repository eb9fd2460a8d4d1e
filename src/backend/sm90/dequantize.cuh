// Packed weights -> the A fragment of wgmma, in registers (the bit layout: backend/cuda/packed_tile.h).
//
// Three masks and shifts give three pairs of bf16 e2m1 * 2^-126, three more the fourth; a scale byte of UE5M3 becomes
// bf16 s * 2^107, and one multiplication gives e2m1 * s * 2^-19, exactly. The factor 2^19 is left for the sums.
#pragma once

#include <cstdint>

namespace nvfp4_moe::sm90 {

inline constexpr float kSumFactor = 0x1p19f;
inline constexpr uint32_t kScaleBase = 0x70007000u;

// Two products with the low or the high half of `scales`: the instruction selects the half itself.
__device__ inline uint32_t times_low(uint32_t pair, uint32_t scales) {
  uint32_t product;
  asm("{\n\t.reg .b16 l, h;\n\t.reg .b32 s;\n\tmov.b32 {l, h}, %2;\n\tmov.b32 s, {l, l};\n\t"
      "mul.rn.bf16x2 %0, %1, s;\n\t}"
      : "=r"(product)
      : "r"(pair), "r"(scales));
  return product;
}
__device__ inline uint32_t times_high(uint32_t pair, uint32_t scales) {
  uint32_t product;
  asm("{\n\t.reg .b16 l, h;\n\t.reg .b32 s;\n\tmov.b32 {l, h}, %2;\n\tmov.b32 s, {h, h};\n\t"
      "mul.rn.bf16x2 %0, %1, s;\n\t}"
      : "=r"(product)
      : "r"(pair), "r"(scales));
  return product;
}

// codes: a lane's word of one k16 step. scale_word: bytes (r, even step), (r, odd), (r + 8, even), (r + 8, odd).
// scale_base: kScaleBase in a register, which saves a move at every use. fragment: 4 words.
template <bool kOddStep>
__device__ inline void dequantize(uint32_t codes, uint32_t scale_word, uint32_t scale_base, uint32_t* fragment) {
  constexpr uint32_t kMask = 0x81C081C0u;
  uint32_t scales;
  if constexpr (kOddStep)  // (word >> 4 & 0x0FF00FF0) | base
    asm("lop3.b32 %0, %1, 0x0FF00FF0, %2, 0xEA;" : "=r"(scales) : "r"(scale_word >> 4), "r"(scale_base));
  else
    asm("mad.lo.u32 %0, %1, 16, %2;" : "=r"(scales) : "r"(scale_word & 0x00FF00FFu), "r"(scale_base));
  const uint32_t last = ((codes << 1) & 0x80008000u) | ((codes >> 3) & 0x01800180u) | ((codes >> 7) & 0x00400040u);
  fragment[0] = times_low(codes & kMask, scales);
  fragment[1] = times_high((codes << 3) & kMask, scales);
  fragment[2] = times_low((codes << 6) & kMask, scales);
  fragment[3] = times_high(last, scales);
}

}  // namespace nvfp4_moe::sm90
