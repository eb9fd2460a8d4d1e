// Packed weights -> the A fragment of wgmma, in registers (the bit layout: backend/cuda/packed_tile.h).
//
// A word gives four pairs of bf16 e2m1 * 2^-126, two scale bytes of UE5M3 become bf16 s * 2^107, and one multiplication
// of each gives e2m1 * s * 2^-19, exactly. The factor 2^19 is left for the epilogue.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/arithmetic.cuh"

namespace nvfp4_moe::sm90 {

inline constexpr float kAccumulatorFactor = 0x1p19f;
inline constexpr uint32_t kScaleBase = 0x70007000u;

// codes: a lane's word of one k16 step, an even or an odd one. scale_base: kScaleBase in a register, which saves a move
// at every use. fragment: 4 words.
template <bool kOddStep>
__device__ inline void dequantize(uint32_t codes, uint32_t scale_word, uint32_t scale_base, uint32_t* fragment) {
  const uint32_t scales =
      cuda::ptx::lop3_and_or<cuda::kScalesMask>(cuda::scales_of_step(scale_word, kOddStep), scale_base);
  const cuda::CodePairs pairs = cuda::code_pairs(codes);
  fragment[0] = cuda::ptx::mul_bf16x2_low(pairs.a[0], scales);
  fragment[1] = cuda::ptx::mul_bf16x2_high(pairs.a[1], scales);
  fragment[2] = cuda::ptx::mul_bf16x2_low(pairs.a[2], scales);
  fragment[3] = cuda::ptx::mul_bf16x2_high(pairs.a[3], scales);
}

}  // namespace nvfp4_moe::sm90
