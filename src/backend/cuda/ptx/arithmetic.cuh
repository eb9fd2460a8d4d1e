// Arithmetic with a specific PTX instruction, chosen for its rounding, its treatment of NaN or its
// cost. The compiler would choose another one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4_moe::internal::cuda::ptx {

// min.NaN and max.NaN: NaN if either operand is.
__device__ inline float min_nan(float x, float y) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}
__device__ inline float max_nan(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

// rcp.approx.ftz: within one ulp. IEEE division is a function call, around which ptxas serializes
// wgmma.
__device__ inline float rcp_approx(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// ex2.approx.ftz: 2^x within two ulps.
__device__ inline float ex2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// cvt.rn.satfinite: a pair of E4M3, `low` in the lower byte; to nearest even, subnormals kept.
__device__ inline uint16_t e4m3x2(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// lop3: (x & kMask) | y as one instruction; the compiler emits two if y is a constant.
template <uint32_t kMask>
__device__ inline uint32_t lop3_and_or(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(x), "n"(kMask), "r"(y));
  return result;
}

// mul.rn.bf16x2 of a pair with the low, or the high, half of `scales`: ptxas folds the selection
// into the HMUL2.
__device__ inline uint32_t mul_bf16x2_low(uint32_t pair, uint32_t scales) {
  uint32_t product;
  asm("{\n\t.reg .b16 l, h;\n\t.reg .b32 s;\n\tmov.b32 {l, h}, %2;\n\tmov.b32 s, {l, l};\n\t"
      "mul.rn.bf16x2 %0, %1, s;\n\t}"
      : "=r"(product)
      : "r"(pair), "r"(scales));
  return product;
}
__device__ inline uint32_t mul_bf16x2_high(uint32_t pair, uint32_t scales) {
  uint32_t product;
  asm("{\n\t.reg .b16 l, h;\n\t.reg .b32 s;\n\tmov.b32 {l, h}, %2;\n\tmov.b32 s, {h, h};\n\t"
      "mul.rn.bf16x2 %0, %1, s;\n\t}"
      : "=r"(product)
      : "r"(pair), "r"(scales));
  return product;
}

// Four of the eight bytes: nibble i of `picks`, 0 to 7, is the index of byte i. Higher bits of
// `picks` have no effect.
__device__ inline uint32_t prmt(uint2 bytes, uint32_t picks) {
  uint32_t picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(bytes.x), "r"(bytes.y), "r"(picks));
  return picked;
}

}  // namespace nvfp4_moe::internal::cuda::ptx
