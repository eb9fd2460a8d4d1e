// Packed weights -> the A fragment of wgmma, in registers (the bit layout: backend/cuda/packed_tile.h).
//
// A word gives four pairs of bf16 e2m1 * 2^-126, two scale bytes of UE5M3 become bf16 s * 2^107, and one multiplication
// of each gives e2m1 * s * 2^-19, exactly. The factor 2^19 is left for the sums.
#pragma once

#include <cstdint>

#include "backend/cuda/packed_tile.h"

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

// codes: a lane's word of one k16 step, an even or an odd one. scale_base: kScaleBase in a register, which saves a move
// at every use. fragment: 4 words.
template <bool kOddStep>
__device__ inline void dequantize(uint32_t codes, uint32_t scale_word, uint32_t scale_base, uint32_t* fragment) {
  uint32_t scales;  // (word & mask) | base, with the base in a register
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
      : "=r"(scales)
      : "r"(cuda::scales_in_place(scale_word, kOddStep)), "n"(cuda::kScalesMask), "r"(scale_base));
  const cuda::CodePairs pairs = cuda::code_pairs(codes);
  fragment[0] = times_low(pairs.a[0], scales);
  fragment[1] = times_high(pairs.a[1], scales);
  fragment[2] = times_low(pairs.a[2], scales);
  fragment[3] = times_high(pairs.a[3], scales);
}

}  // namespace nvfp4_moe::sm90
