// The instruction set "avx2": vpmaddubsw on 256-bit registers for 8-bit activations, fp32
// multiply-adds for W4A16.
//
// Weights are u8 = 2w + 12 as in avx512vnni. A product pair is at most 2 * 24 * 127, and the four
// pairs of a row's block add up to less than 2^15, so 16-bit accumulators are exact. One block of
// 16 weight rows stays decoded in registers (8 of 16) while all rows of activations pass; the
// accumulators are in L1.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "backend/cpu/kernels.h"
#include "backend/cpu/prefetch.h"
#include "backend/cpu/target.h"
#include "core/float_formats.h"

NVFP4_MOE_TARGET_BEGIN("avx2,fma,f16c")
namespace nvfp4_moe::internal::cpu {
namespace {

// The order matters: each needs the ones before it.
// clang-format off
#include "backend/cpu/vector_avx2.h"
#include "backend/cpu/operands_x86.h"
#include "backend/cpu/gelu_situ_rows.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/float_block_avx2.h"
#include "backend/cpu/float_small_batch.h"
#include "backend/cpu/float_tile.h"
// clang-format on

// u8 weights of rows 8 h .. 8 h + 7 and k 4 j .. 4 j + 3, and those rows' block scales times 2^-8.
struct Block {
  __m256i weights[2][4];
  __m256 scale[2];
};

inline void decode(const uint8_t* chunk, int64_t b, Block& block) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m256i nibble = _mm256_set1_epi8(15);
  // An E4M3 byte shifted by 7 is an fp16 number 2^-8 times as large, including subnormals.
  const __m256i halves = _mm256_slli_epi16(
      _mm256_cvtepu8_epi16(load128(chunk + kChunkScalesOffset + b * kPanelRows)), 7);
  block.scale[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  block.scale[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  for (int h = 0; h < 2; ++h) {
    for (int half = 0; half < 2; ++half) {
      const __m256i codes = load256(chunk + b * kBlockCodesBytes + half * 64 + h * 32);
      block.weights[h][2 * half] = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, nibble));
      block.weights[h][2 * half + 1] =
          _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
    }
  }
}

inline __m256i broadcast4(const void* p) {
  int32_t four = 0;
  std::memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}

// acc (16) + the row's block times the panel's.
inline void add_block(const Block& block, const Int8Block& row, bool first, float* acc) {
  const __m256i x0 = broadcast4(row.values), x1 = broadcast4(row.values + 4);
  const __m256i x2 = broadcast4(row.values + 8), x3 = broadcast4(row.values + 12);
  const __m256i bias = _mm256_set1_epi32(row.bias), one = _mm256_set1_epi16(1);
  const __m256 scale = _mm256_set1_ps(row.scale);
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256i(&w)[4] = block.weights[h];
    const __m256i low =
        _mm256_add_epi16(_mm256_maddubs_epi16(w[0], x0), _mm256_maddubs_epi16(w[1], x1));
    const __m256i high =
        _mm256_add_epi16(_mm256_maddubs_epi16(w[2], x2), _mm256_maddubs_epi16(w[3], x3));
    const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(_mm256_add_epi16(low, high), one), bias);
    const __m256 before = first ? _mm256_setzero_ps() : _mm256_loadu_ps(acc + 8 * h);
    _mm256_storeu_ps(acc + 8 * h, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum),
                                                  _mm256_mul_ps(block.scale[h], scale), before));
  }
}

void multiply_int8(const Strip& strip, const OperandRows& rows, float* acc) {
  const int64_t acc_stride = strip.panels * kPanelRows;
  for (int64_t p = 0; p < strip.panels; ++p) {
    for (int64_t c = 0; c < strip.chunks; ++c) {
      prefetch_ahead(strip, p, c);
      for (int64_t b = 0; b < kBlocksPerChunk; ++b) {
        Block block;
        decode(strip.bytes + (p * strip.chunks + c) * kChunkBytes, b, block);
        const int64_t index = c * kBlocksPerChunk + b;
        for (int64_t i = 0; i < rows.count; ++i)
          add_block(block, int8_blocks(rows.rows[i])[index], index == 0,
                    acc + i * acc_stride + p * kPanelRows);
      }
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::cpu
NVFP4_MOE_TARGET_END

namespace nvfp4_moe::internal::cpu {
namespace {

bool runs_on_host() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

}  // namespace

const Kernels kAvx2Kernels{
    .name = "avx2",
    .backend_name = "cpu:avx2",
    .requires_text = "AVX2, FMA and F16C",
    .runs_on_host = runs_on_host,
    .nvfp4 = {"avx2_int8", kInt8ChunkBytes, 1, multiply_int8},
    .int8_block = {"avx2_int8", kInt8ChunkBytes, 1, multiply_int8},
    .bf16 = {"avx2_fp32", kFloatChunkBytes, 1, multiply_fp32},
    .fp8 = {"avx2_fp32_e4m3", kFloatChunkBytes, 1, multiply_fp8},
    .nvfp4_operands = nvfp4_operands,
    .int8_operands = int8_operands,
    .bf16_operands = fp32_operands,
    .fp8_operands = fp32_operands_of_fp8,
    .swiglu = swiglu_rows,
    .round = round_rows,
    .amax = row_amax,
    .quantize = quantize_row,
    .quantize_int8 = quantize_row_int8,
    .quantize_fp8 = quantize_row_fp8,
    .to_bf16 = row_to_bf16,
    .scale_hidden = scale_hidden_row,
    .combine = combine_tokens,
};

}  // namespace nvfp4_moe::internal::cpu
#endif
