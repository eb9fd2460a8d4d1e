// The instruction set "avx2": vpmaddubsw on 256-bit registers for 8-bit activations, fp32
// multiply-adds for W4A16.
//
// Weights are u8 = 2w + 12 as in avx512vnni. A product pair is at most 2 * 24 * 127, and the four
// pairs of a row's block add up to less than 2^15, so 16-bit accumulators are exact.
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

inline __m256i broadcast4(const void* p) {
  int32_t four = 0;
  std::memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}

// A panel's rows 8 h .. 8 h + 7 are half h of its registers.

// 32 bytes of codes of block b: k 8 v .. 8 v + 3 of half h in the low nibbles, 8 v + 4 .. 8 v + 7
// in the high ones.
inline __m256i load_codes(const uint8_t* chunk, int64_t b, int v, int h) {
  return load256(chunk + b * kBlockCodesBytes + v * 64 + h * 32);
}
// u8 weights of the low and of the high nibbles.
inline __m256i low_weights(__m256i codes) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  return _mm256_shuffle_epi8(table, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
}
inline __m256i high_weights(__m256i codes) { return low_weights(_mm256_srli_epi16(codes, 4)); }

// The block scales of half h times 2^-8: an E4M3 byte shifted by 7 is an fp16 number that much
// smaller, including subnormals.
inline __m256 small_scales(const uint8_t* chunk, int64_t b, int h) {
  const uint8_t* bytes = chunk + kChunkScalesOffset + b * kPanelRows + 8 * h;
  const __m128i vec8 = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(vec8), 7));
}

// acc + a block's scaled product; a row of weights has two 16-bit parts of it in `pairs`.
inline __m256 add_scaled(__m256i pairs, const Int8Block& row, __m256 scale, __m256 acc) {
  const __m256i sum =
      _mm256_add_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), _mm256_set1_epi32(row.bias));
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale, _mm256_set1_ps(row.scale)),
                         acc);
}

// acc[i] + block b of every panel times block `index` of row i. Panels and halves take turns at
// each step: for one row that is 9 % faster on Zen 3 than one half after the other.
template <int kPanels, int kCount>
inline void add_small_batch(const uint8_t* const (&chunks)[kPanels], int64_t b,
                            const Int8Block* const (&rows)[kCount], int64_t index,
                            __m256 (&acc)[kCount][kPanels][2]) {
  __m256i pairs[kCount][kPanels][2];
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    __m256i low[kPanels][2], high[kPanels][2];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i codes = load_codes(chunks[p], b, v, h);
        low[p][h] = low_weights(codes);
        high[p][h] = high_weights(codes);
      }
    }
#pragma GCC unroll 3
    for (int i = 0; i < kCount; ++i) {
      const int8_t* values = rows[i][index].values + 8 * v;
      const __m256i x0 = broadcast4(values), x1 = broadcast4(values + 4);
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          const __m256i sum = _mm256_add_epi16(_mm256_maddubs_epi16(low[p][h], x0),
                                               _mm256_maddubs_epi16(high[p][h], x1));
          pairs[i][p][h] = v == 0 ? sum : _mm256_add_epi16(pairs[i][p][h], sum);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = small_scales(chunks[p], b, h);
#pragma GCC unroll 3
      for (int i = 0; i < kCount; ++i)
        acc[i][p][h] = add_scaled(pairs[i][p][h], rows[i][index], scale, acc[i][p][h]);
    }
  }
}

// The accumulators stay in registers, and every panel's bytes arrive at the same time.
template <int kPanels, int kCount>
void multiply_int8_small_batch(const Strip& strip, const std::byte* const* rows, float* acc) {
  const Int8Block* x[kCount];
  for (int i = 0; i < kCount; ++i) x[i] = int8_blocks(rows[i]);
  __m256 sum[kCount][kPanels][2];
  for (auto& row : sum)
    for (auto& panel : row) panel[0] = panel[1] = _mm256_setzero_ps();
  for (int64_t c = 0; c < strip.chunks; ++c) {
    const Chunks<kPanels> chunks(strip, c);
#pragma GCC unroll 1
    for (int64_t b = 0; b < kBlocksPerChunk; ++b)
      add_small_batch(chunks.bytes, b, x, c * kBlocksPerChunk + b, sum);
  }
  for (int i = 0; i < kCount; ++i)
    for (int p = 0; p < kPanels; ++p)
      for (int h = 0; h < 2; ++h)
        _mm256_storeu_ps(acc + (i * kPanels + p) * kPanelRows + 8 * h, sum[i][p][h]);
}

// One block of a panel, 8 of 16 registers, stays decoded while all rows of activations pass; the
// accumulators are in L1.
struct Block {
  __m256i weights[2][4];
  __m256 scale[2];

  Block(const uint8_t* chunk, int64_t b) {
    for (int h = 0; h < 2; ++h) {
      for (int v = 0; v < 2; ++v) {
        const __m256i codes = load_codes(chunk, b, v, h);
        weights[h][2 * v] = low_weights(codes);
        weights[h][2 * v + 1] = high_weights(codes);
      }
      scale[h] = small_scales(chunk, b, h);
    }
  }
  // acc (16) + the row's block times the panel's.
  void add(const Int8Block& row, float* acc) const {
    __m256i pairs[2];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i x = broadcast4(row.values + 4 * j);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i product = _mm256_maddubs_epi16(weights[h][j], x);
        pairs[h] = j == 0 ? product : _mm256_add_epi16(pairs[h], product);
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      float* half = acc + 8 * h;
      _mm256_storeu_ps(half, add_scaled(pairs[h], row, scale[h], _mm256_loadu_ps(half)));
    }
  }
};

void multiply_int8_large_batch(const Strip& strip, const std::byte* const* rows, int64_t count,
                               float* acc) {
  const int64_t stride = strip.panels * kPanelRows;
  std::fill(acc, acc + count * stride, 0.0f);
  for (int64_t p = 0; p < strip.panels; ++p) {
    for (int64_t c = 0; c < strip.chunks; ++c) {
      prefetch_ahead(strip, p, c);
      for (int64_t b = 0; b < kBlocksPerChunk; ++b) {
        const Block block(strip.bytes + (p * strip.chunks + c) * kChunkBytes, b);
        for (int64_t i = 0; i < count; ++i)
          block.add(int8_blocks(rows[i])[c * kBlocksPerChunk + b],
                    acc + i * stride + p * kPanelRows);
      }
    }
  }
}

template <int kPanels>
void multiply_int8_panels(const Strip& strip, const OperandRows& all, float* acc) {
  switch (all.count) {
    case 1: return multiply_int8_small_batch<kPanels, 1>(strip, all.rows, acc);
    case 2: return multiply_int8_small_batch<kPanels, 2>(strip, all.rows, acc);
    case 3: return multiply_int8_small_batch<kPanels, 3>(strip, all.rows, acc);
    default: return multiply_int8_large_batch(strip, all.rows, all.count, acc);
  }
}

void multiply_int8(const Strip& strip, const OperandRows& rows, float* acc) {
  if (strip.panels == 1) return multiply_int8_panels<1>(strip, rows, acc);
  multiply_int8_panels<2>(strip, rows, acc);
}

#include "backend/cpu/integer_block_avx2.h"

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
    .bf16 = {"avx2_fp32", kFloatChunkBytes, 1, multiply_bf16, kIntegerChunkBytes},
    .fp8 = {"avx2_fp32_e4m3", kFloatChunkBytes, 1, multiply_fp8},
    .nvfp4_operands = nvfp4_operands,
    .int8_operands = int8_operands,
    .bf16_operands = fp32_operands,
    .single_row_operands = integer_blocks_of_floats<kFloatChunkBytes>,
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
