// The instruction set "avx512bf16": vdpbf16ps for W4A16 and fp8; other 8-bit activations as in
// avx512vnni.
//
// A lane is a row of the panel and takes two bf16 products at a time. Weights are decoded with
// their block scale folded in, which bf16 holds exactly: four instructions for 32 weights, all on
// 16-bit integers. In a 32-bit lane the codes appear in the order k = 0 2 4 6 1 3 5 7 (of 8), two
// at a time, so the rows' elements are stored in that order.
//
// Order of additions: within a slice of float_slice(K) elements the 8-halves of the blocks go to
// two chains; then the chains are added, then the slices. It is the same for any number of rows. Up
// to eight rows may instead apply the scale after each block, which reads weights twice as fast
// (unless OperandRows::same_bits; not under fp8, whose weights are rounded with their scale). The
// instruction treats subnormal inputs, products and results as 0: an activation below 2^-116 counts
// as 0.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "backend/cpu/kernels.h"
#include "backend/cpu/prefetch.h"
#include "backend/cpu/target.h"
#include "core/float_formats.h"

NVFP4_MOE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,avx512bf16")
namespace nvfp4_moe::internal::cpu {
namespace {

// The order matters: each needs the ones before it.
// clang-format off
#include "backend/cpu/vector_avx512.h"
#include "backend/cpu/operands_x86.h"
#include "backend/cpu/gelu_situ_rows.h"
#include "backend/cpu/rows.h"
// clang-format on

constexpr bool kPermuteBytes = true;
constexpr PrefetchInto kPrefetchInto = PrefetchInto::kL2;
inline __m512i permute_bytes(__m512i index, __m512i table) {
  return _mm512_permutexvar_epi8(index, table);
}

#include "backend/cpu/bf16_avx512.h"
#include "backend/cpu/int8_avx512.h"

// bf16 values of the codes, twice, since the lookup reads five bits.
alignas(64) constexpr uint16_t kValues[32] = {
    0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80,
    0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040,
    0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};

constexpr int kTileRows = 4;  // x 2 panels x 2 chains = 16 accumulators of 32 registers

inline __m512bh pair_of(const uint32_t* row, int64_t pair) {
  return (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(row[pair]));
}

// ---- a slice of kPanels panels times kCount rows

template <int kPanels, int kCount, int kChains = 2>
struct Tile {
  __m512 chain[kChains][kPanels][kCount];

  Tile() {
    for (auto& half : chain)
      for (auto& panel : half)
        for (__m512& sum : panel) sum = _mm512_setzero_ps();
  }
  void add(int half, const __m512bh (&w)[kPanels], const uint32_t* const (&rows)[kCount],
           int64_t pair) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      const __m512bh x = pair_of(rows[i], pair);
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p)
        chain[half % kChains][p][i] = _mm512_dpbf16_ps(chain[half % kChains][p][i], w[p], x);
    }
  }
  __m512 sum(int p, int i) const {
    return kChains == 1 ? chain[0][p][i] : _mm512_add_ps(chain[0][p][i], chain[kChains - 1][p][i]);
  }
  void add_to(float* acc) const {  // (kCount, kPanels * 16)
    for (int i = 0; i < kCount; ++i)
      for (int p = 0; p < kPanels; ++p) {
        float* out = acc + (i * kPanels + p) * kPanelRows;
        _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), sum(p, i)));
      }
  }
};

// A large batch: a slice of weights is decoded once into L1, and the rows pass in tiles.
struct alignas(64) Slice {
  __m512bh weights[kMostSlice / 2 * kStripPanels];  // (pairs, panels)
};
template <int kPanels, int kCount>
void multiply_slice(const Slice& slice, const std::byte* const* rows, int64_t first_pair,
                    int64_t pairs, float* acc) {
  const uint32_t* x[kCount];
  for (int i = 0; i < kCount; ++i) x[i] = reinterpret_cast<const uint32_t*>(rows[i]) + first_pair;
  Tile<kPanels, kCount> tile;
  for (int64_t pair = 0; pair < pairs; pair += kBlockPairs) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      __m512bh w[kPanels];
      for (int p = 0; p < kPanels; ++p) w[p] = slice.weights[(pair + j) * kPanels + p];
      tile.add(j / 4, w, x, pair + j);
    }
  }
  tile.add_to(acc);
}
template <int kPanels, bool kFp8 = false>
void multiply_slices(const Strip& strip, const std::byte* const* rows, int64_t count, int64_t k,
                     float* acc) {
  const int64_t blocks = k / kBlockElems, step = float_slice(k) / kBlockElems;
  constexpr int64_t kAccStride = kPanels * kPanelRows;
  std::fill(acc, acc + count * kAccStride, 0.0f);
  Slice slice;
  Decoder<kPanels, kFp8> decoder(strip);
  for (int64_t first = 0; first < blocks; first += step) {
    const int64_t count_blocks = std::min(step, blocks - first);
    for (int64_t b = 0; b < count_blocks; ++b)
      decoder.decode_next(slice.weights + b * kBlockPairs * kPanels);
    const int64_t first_pair = first * kBlockPairs, pairs = count_blocks * kBlockPairs;
    int64_t i = 0;
    for (; i + kTileRows <= count; i += kTileRows)
      multiply_slice<kPanels, kTileRows>(slice, rows + i, first_pair, pairs, acc + i * kAccStride);
    switch (count - i) {
      case 1:
        multiply_slice<kPanels, 1>(slice, rows + i, first_pair, pairs, acc + i * kAccStride);
        break;
      case 2:
        multiply_slice<kPanels, 2>(slice, rows + i, first_pair, pairs, acc + i * kAccStride);
        break;
      case 3:
        multiply_slice<kPanels, 3>(slice, rows + i, first_pair, pairs, acc + i * kAccStride);
        break;
      default: break;
    }
  }
}

// A small batch is limited by memory and leaves no time to fold scales into weights. A block's
// chains start from 0, are added, and are scaled into the accumulator: |err| <= (K/16 + 16) 2^-24
// sum|p|.
template <int kPanels, int kCount>
void multiply_small_batch(const Strip& strip, const std::byte* const* rows, float* acc) {
  const __m512i table = _mm512_load_si512(kValues);
  const uint32_t* x[kCount];
  __m512 sum[kPanels][kCount];
  for (int i = 0; i < kCount; ++i) {
    x[i] = reinterpret_cast<const uint32_t*>(rows[i]);
    for (int p = 0; p < kPanels; ++p) sum[p][i] = _mm512_setzero_ps();
  }
  for (int64_t c = 0; c < strip.chunks; ++c) {
    for (int p = 0; p < kPanels; ++p) prefetch_ahead<kPrefetchInto>(strip, p, c);
#pragma GCC unroll 1
    for (int64_t b = 0; b < kBlocksPerChunk; ++b) {
      const int64_t first_pair = (c * kBlocksPerChunk + b) * kBlockPairs;
      Tile<kPanels, kCount, kCount <= 4 ? 2 : 1> block;  // as many as fit into registers
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m512i codes[kPanels];
        for (int p = 0; p < kPanels; ++p)
          codes[p] = _mm512_loadu_si512(strip.bytes + (p * strip.chunks + c) * kChunkBytes +
                                        b * kBlockCodesBytes + half * 64);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          __m512bh w[kPanels];
          for (int p = 0; p < kPanels; ++p) {
            w[p] = (__m512bh)_mm512_permutexvar_epi16(codes[p], table);
            codes[p] = _mm512_srli_epi16(codes[p], 4);
          }
          block.add(half, w, x, first_pair + half * 4 + j);
        }
      }
      for (int p = 0; p < kPanels; ++p) {
        const __m512 scale = small_scales(strip.bytes + (p * strip.chunks + c) * kChunkBytes +
                                          kChunkScalesOffset + b * kPanelRows);
        for (int i = 0; i < kCount; ++i)
          sum[p][i] = _mm512_fmadd_ps(block.sum(p, i), scale, sum[p][i]);
      }
    }
  }
  for (int i = 0; i < kCount; ++i)
    for (int p = 0; p < kPanels; ++p)
      _mm512_storeu_ps(acc + (i * kPanels + p) * kPanelRows,
                       _mm512_mul_ps(sum[p][i], _mm512_set1_ps(256.0f)));
}

template <int kPanels>
void multiply(const Strip& strip, const OperandRows& rows, float* acc) {
  constexpr int64_t kShortest = kChunkK;  // for smaller K the bound of a small batch would not hold
  const std::byte* const* second = rows.rows + 4;
  switch (rows.same_bits || rows.k < kShortest ? 0 : rows.count) {
    case 1: return multiply_small_batch<kPanels, 1>(strip, rows.rows, acc);
    case 2: return multiply_small_batch<kPanels, 2>(strip, rows.rows, acc);
    case 3: return multiply_small_batch<kPanels, 3>(strip, rows.rows, acc);
    case 4: return multiply_small_batch<kPanels, 4>(strip, rows.rows, acc);
    case 5: return multiply_small_batch<kPanels, 5>(strip, rows.rows, acc);
    case 6: return multiply_small_batch<kPanels, 6>(strip, rows.rows, acc);
    case 7:
      multiply_small_batch<kPanels, 4>(strip, rows.rows, acc);
      return multiply_small_batch<kPanels, 3>(strip, second, acc + 4 * kPanels * kPanelRows);
    case 8:
      multiply_small_batch<kPanels, 4>(strip, rows.rows, acc);
      return multiply_small_batch<kPanels, 4>(strip, second, acc + 4 * kPanels * kPanelRows);
    default: return multiply_slices<kPanels>(strip, rows.rows, rows.count, rows.k, acc);
  }
}

void multiply_bf16(const Strip& strip, const OperandRows& rows, float* acc) {
  if (strip.panels == 1) return multiply<1>(strip, rows, acc);
  multiply<2>(strip, rows, acc);
}
void multiply_fp8(const Strip& strip, const OperandRows& rows, float* acc) {
  if (strip.panels == 1) return multiply_slices<1, true>(strip, rows.rows, rows.count, rows.k, acc);
  multiply_slices<2, true>(strip, rows.rows, rows.count, rows.k, acc);
}

}  // namespace
}  // namespace nvfp4_moe::internal::cpu
NVFP4_MOE_TARGET_END

namespace nvfp4_moe::internal::cpu {
namespace {

bool runs_on_host() {
  return kAvx512VnniKernels.runs_on_host() && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512bf16");
}

}  // namespace

const Kernels kAvx512Bf16Kernels{
    .name = "avx512bf16",
    .backend_name = "cpu:avx512bf16",
    .requires_text = "AVX512F, BW, VL, VBMI, VNNI and BF16",
    .runs_on_host = runs_on_host,
    .nvfp4 = {"avx512vbmi_vnni_int8", kInt8ChunkBytes, 1, multiply_int8},
    .int8_block = {"avx512vbmi_vnni_int8", kInt8ChunkBytes, 1, multiply_int8},
    .bf16 = {"avx512bf16_bf16", kBf16ChunkBytes, 1, multiply_bf16},
    .fp8 = {"avx512bf16_e4m3", kBf16ChunkBytes, 1, multiply_fp8},
    .nvfp4_operands = nvfp4_operands,
    .int8_operands = int8_operands,
    .bf16_operands = bf16_operands,
    .fp8_operands = bf16_operands_of_fp8,
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
