// The instruction set "amx": bf16 tiles for W4A4, W4A16 and fp8; int8 activations with fp32 scales
// as in avx512bf16.
//
// A tile multiplication takes 16 rows of activations x 16 weight rows x 32 of K in 16 cycles.
// Weights are decoded with their block scale folded in (bf16_avx512.h) into a ring in L1, from
// which tiles load them a few blocks later.
//
// W4A4: activations also include their block scales, and tiles are half as deep, one block of 16.
// The products of a block and their sum are then exact in fp32, in any order. Each block is added
// to the accumulator with one rounding, in order, which gives the bits of the integer kernels.
// W4A16: 16 pairs are added in two chains, the chains are added, and the sum is added to the
// accumulator: |err| <= (16 + K/32) 2^-24 sum|p|, inside the contract's bound from K = 64 on; below
// that, tiles are half as deep too. Unless OperandRows::same_bits, one or two rows with integers
// use integer_block_avx512.h instead, and a single row without them uses float_small_batch.h. fp8:
// as W4A16, with any number of rows in tiles. The instruction treats subnormal inputs, products and
// accumulators as 0: an activation below 2^-116 counts as 0.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "backend/cpu/kernels.h"
#include "backend/cpu/prefetch.h"
#include "backend/cpu/target.h"
#include "core/amx_tiles.h"
#include "core/float_formats.h"

NVFP4_MOE_TARGET_BEGIN(
    "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,avx512bf16,amx-tile,amx-bf16")
namespace nvfp4_moe::internal::cpu {
namespace {

// The order matters: each needs the ones before it.
// clang-format off
#include "backend/cpu/vector_avx512.h"
#include "backend/cpu/operands_x86.h"
#include "backend/cpu/gelu_situ_rows.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/float_block.h"
#include "backend/cpu/float_small_batch.h"
// clang-format on

constexpr bool kPermuteBytes = true;
constexpr PrefetchInto kPrefetchInto = PrefetchInto::kL1;
inline __m512i permute_bytes(__m512i index, __m512i table) {
  return _mm512_permutexvar_epi8(index, table);
}

#include "backend/cpu/int8_avx512.h"
// Must come after int8_avx512.h.
#include "backend/cpu/bf16_avx512.h"
#include "backend/cpu/integer_block_avx512.h"

// e2m1 * e4m3 of a row as bf16, in the order of pairs: low nibbles of four bytes, then their high
// nibbles.
void scaled_operands(const uint8_t* codes, const uint8_t* block_scales, int64_t k, std::byte* out) {
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                       -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  const __m128i nibble = _mm_set1_epi8(15);
  const int64_t blocks = k / kBlockElems;
  for (int64_t b = 0; b < blocks; ++b) {
    const __m128i packed =
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + b * (kBlockElems / 2)));
    const __m128i low = _mm_and_si128(packed, nibble),
                  high = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
    const __m512i index = _mm512_cvtepu8_epi32(_mm_unpacklo_epi32(low, high));
    const __m512 scaled = _mm512_mul_ps(_mm512_permutexvar_ps(index, values),
                                        _mm512_set1_ps(e4m3_to_float(block_scales[b])));
    const __m256i top = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(scaled), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + b * 32), top);
  }
  std::memset(out + blocks * 32, 0,
              static_cast<size_t>(chunks_of(k) * kBf16ChunkBytes - blocks * 32));
}

// A W4A4 row for tiles, followed by the same row for vpdpbusd, which is faster for a small batch.
// An expert's number of rows is not known when operands are written; both give the same bits.
constexpr int64_t kNvfp4ChunkBytes = kBf16ChunkBytes + kInt8ChunkBytes;
constexpr int64_t kInt8SmallBatchRows = 8;

void tile_nvfp4_operands(const uint8_t* codes, const uint8_t* block_scales, int64_t k,
                         std::byte* out) {
  scaled_operands(codes, block_scales, k, out);
  nvfp4_operands(codes, block_scales, k, out + chunks_of(k) * kBf16ChunkBytes);
}

// ---- tiles: 0..5 accumulators (16 rows x 16 weight rows each), 6 rows of activations, 7 weights

constexpr int64_t kTileRows = 16;
constexpr int64_t kMostAccumulators = 6, kMostRows = 4 * kTileRows;
constexpr int kRowsTile = 6, kWeightsTile = 7;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

// The compiler's intrinsics take no template arguments, and do not declare the memory that they
// access.
inline void configure(const TileConfig& config) {
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
inline void release() { asm volatile("tilerelease" ::: "memory"); }
template <int kTile>
inline void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
inline void load(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void store(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(kTile) : "memory");
}
template <int kSum>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kWeightsTile), "i"(kRowsTile),
               "i"(kSum));
}

// kTiles tiles of rows times kPanels panels; accumulator p * kTiles + i is that of panel p and tile
// i.
template <int kPanels, int kTiles, int kSum = 0>
inline void clear_accumulators() {
  clear<kSum>();
  if constexpr (kSum + 1 < kPanels * kTiles) clear_accumulators<kPanels, kTiles, kSum + 1>();
}
template <int kPanels, int kTiles, int kSum = 0>
inline void store_accumulators(float* acc, int64_t acc_stride) {  // in floats
  store<kSum>(acc + kSum % kTiles * kTileRows * acc_stride + kSum / kTiles * kPanelRows,
              acc_stride * 4);
  if constexpr (kSum + 1 < kPanels * kTiles)
    store_accumulators<kPanels, kTiles, kSum + 1>(acc, acc_stride);
}
// Multiplies rows at `rows`, row_bytes apart, with weights (pairs, kPanels) vectors.
template <int kPanels, int kTiles, int kSum = 0>
inline void multiply_tiles(const std::byte* rows, int64_t row_bytes, const __m512bh* weights) {
  if constexpr (kSum % kTiles == 0) load<kWeightsTile>(weights + kSum / kTiles, kPanels * 64);
  load<kRowsTile>(rows + kSum % kTiles * kTileRows * row_bytes, row_bytes);
  multiply_add<kSum>();
  if constexpr (kSum + 1 < kPanels * kTiles)
    multiply_tiles<kPanels, kTiles, kSum + 1>(rows, row_bytes, weights);
}

// ---- a strip

// Weights between the decoder and the tiles, in L1. The tiles read a few blocks later, when the
// stores have arrived there.
constexpr int64_t kRingBlocks = 8, kBlocksAhead = 4;
struct alignas(64) Ring {
  __m512bh weights[kRingBlocks * kBlockPairs * kStripPanels];  // (pairs, panels)

  __m512bh* block(int64_t b, int64_t panels) {
    return weights + b % kRingBlocks * kBlockPairs * panels;
  }
};

// All rows times kPanels panels, kStepBlocks blocks of K per step. Accumulators stay in tiles from
// the first block to the last.
template <int kPanels, int kTiles, int kStepBlocks, bool kFp8>
void multiply_panels(const Strip& strip, const std::byte* rows, int64_t row_bytes, float* acc,
                     int64_t acc_stride) {
  const int64_t blocks = strip.chunks * kBlocksPerChunk;
  Ring ring;
  Decoder<kPanels, kFp8> decoder(strip);
  clear_accumulators<kPanels, kTiles>();
  for (int64_t b = 0; b < std::min(kBlocksAhead, blocks); ++b)
    decoder.decode_next(ring.block(b, kPanels));
  for (int64_t b = 0; b < blocks; b += kStepBlocks) {
    multiply_tiles<kPanels, kTiles>(rows + b * kBlockPairs * 4, row_bytes, ring.block(b, kPanels));
    for (int64_t ahead = b + kBlocksAhead; ahead < std::min(b + kBlocksAhead + kStepBlocks, blocks);
         ++ahead)
      decoder.decode_next(ring.block(ahead, kPanels));
  }
  store_accumulators<kPanels, kTiles>(acc, acc_stride);
}

// One panel of a strip as a separate strip.
inline Strip panel_of(const Strip& strip, int64_t p) {
  const uint8_t* bytes = strip.bytes + p * strip.chunks * kChunkBytes;
  const uint8_t* next = p + 1 < strip.panels ? bytes + strip.chunks * kChunkBytes : strip.next;
  const int shift = strip.fp8_shift[static_cast<size_t>(p)];
  return {.bytes = bytes, .panels = 1, .chunks = strip.chunks, .fp8_shift = {shift}, .next = next};
}

// Up to three tiles of rows take both panels of a strip at once; more take one panel after the
// other.
template <int kTiles, int kStepBlocks, bool kFp8>
void multiply_strip(const Strip& strip, const std::byte* rows, int64_t row_bytes, float* acc) {
  const int64_t acc_stride = strip.panels * kPanelRows;
  if constexpr (2 * kTiles <= kMostAccumulators)
    if (strip.panels == 2)
      return multiply_panels<2, kTiles, kStepBlocks, kFp8>(strip, rows, row_bytes, acc, acc_stride);
  for (int64_t p = 0; p < strip.panels; ++p)
    multiply_panels<1, kTiles, kStepBlocks, kFp8>(panel_of(strip, p), rows, row_bytes,
                                                  acc + p * kPanelRows, acc_stride);
}

// Tiles of `count` <= kMostRows rows, kStepBlocks blocks of K deep. If there is more than one tile,
// all are full.
template <int kStepBlocks>
inline TileConfig tile_config(int64_t count) {
  TileConfig config;
  const auto rows = static_cast<uint8_t>(std::min(count, kTileRows));
  for (int tile = 0; tile < kRowsTile; ++tile) config.set(tile, rows, 64);
  config.set(kRowsTile, rows, kStepBlocks * kBlockPairs * 4);
  config.set(kWeightsTile, kStepBlocks * kBlockPairs, 64);
  return config;
}

template <int kStepBlocks, bool kFp8 = false>
void multiply_tiled(const Strip& strip, const OperandRows& all, float* acc) {
  // requests the system's permission, once; without it ldtilecfg is an illegal instruction
  bf16_tiles_run_on_host();
  const int64_t row_bytes = all.count > 1 ? all.rows[1] - all.rows[0] : 0;
  for (int64_t first = 0; first < all.count; first += kMostRows) {
    const int64_t count = std::min(kMostRows, all.count - first);
    const std::byte* rows = all.rows[first];
    float* accumulators = acc + first * strip.panels * kPanelRows;
    configure(tile_config<kStepBlocks>(count));
    switch ((count + kTileRows - 1) / kTileRows) {
      case 1: multiply_strip<1, kStepBlocks, kFp8>(strip, rows, row_bytes, accumulators); break;
      case 2: multiply_strip<2, kStepBlocks, kFp8>(strip, rows, row_bytes, accumulators); break;
      case 3: multiply_strip<3, kStepBlocks, kFp8>(strip, rows, row_bytes, accumulators); break;
      default: multiply_strip<4, kStepBlocks, kFp8>(strip, rows, row_bytes, accumulators); break;
    }
    release();
  }
}

// 16 elements of bf16_operands as fp32, in order.
inline F floats_of_pairs(const std::byte* pairs) {
  const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  const __m512i wide =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs)));
  return {_mm512_castsi512_ps(_mm512_permutexvar_epi32(order, _mm512_slli_epi32(wide, 16)))};
}
constexpr int64_t kBf16BlockBytes = kBf16ChunkBytes / kBlocksPerChunk;

// W4A16, one row: converts it back to fp32, a slice at a time.
constexpr int64_t kSliceChunks = 16;
struct alignas(64) FloatSlice {
  float x[kSliceChunks * kChunkK];
};
void multiply_bf16_row(const Strip& strip, const std::byte* row, float* acc) {
  FloatSlice floats;
  const float* x[1] = {floats.x};
  for (int64_t first = 0; first < strip.chunks; first += kSliceChunks) {
    const int64_t end = std::min(first + kSliceChunks, strip.chunks);
    for (int64_t k = 0; k < (end - first) * kChunkK; k += kLanes)
      store(floats.x + k, floats_of_pairs(row + first * kBf16ChunkBytes + 2 * k));
    if (strip.panels == 1)
      float_small_batch<1, 1>(strip, first, end, x, acc);
    else
      float_small_batch<2, 1>(strip, first, end, x, acc);
  }
}

// Writes the integers of a row of bf16_operands, after it.
void integer_blocks_of_row(int64_t k, std::byte* row) {
  write_integer_blocks(
      chunks_of(k) * kBlocksPerChunk,
      [&](int64_t b) { return floats_of_pairs(row + b * kBf16BlockBytes); },
      reinterpret_cast<IntegerBlock*>(row + chunks_of(k) * kBf16ChunkBytes));
}

// Tiles take as long for one row as for 16, and three rows of integers take longer.
constexpr int kIntegerRows = 2;

void multiply_bf16_integers(const Strip& strip, const OperandRows& all, float* acc) {
  const auto floats = [](const std::byte* row, int64_t index, float* buffer) {
    store(buffer, floats_of_pairs(row + index * kBf16BlockBytes));
    return buffer;
  };
  multiply_integers<kIntegerRows>(
      strip, IntegerRows{all.rows, strip.chunks * kBf16ChunkBytes, floats}, all.count, acc);
}

void multiply_nvfp4(const Strip& strip, const OperandRows& rows, float* acc) {
  if (rows.count <= kInt8SmallBatchRows) {
    const std::byte* int8_rows[kInt8SmallBatchRows];
    for (int64_t i = 0; i < rows.count; ++i)
      int8_rows[i] = rows.rows[i] + chunks_of(rows.k) * kBf16ChunkBytes;
    return multiply_int8(strip, {.rows = int8_rows, .count = rows.count, .k = rows.k}, acc);
  }
  multiply_tiled<1>(strip, rows, acc);
}
void multiply_bf16(const Strip& strip, const OperandRows& rows, float* acc) {
  if (rows.k < kChunkK) return multiply_tiled<1>(strip, rows, acc);
  if (rows.count <= kIntegerRows && rows.for_single_row && !rows.same_bits)
    return multiply_bf16_integers(strip, rows, acc);
  if (rows.count == 1 && !rows.same_bits) return multiply_bf16_row(strip, rows.rows[0], acc);
  multiply_tiled<2>(strip, rows, acc);
}
void multiply_fp8(const Strip& strip, const OperandRows& rows, float* acc) {
  if (rows.k < kChunkK) return multiply_tiled<1, true>(strip, rows, acc);
  multiply_tiled<2, true>(strip, rows, acc);
}

}  // namespace
}  // namespace nvfp4_moe::internal::cpu
NVFP4_MOE_TARGET_END

namespace nvfp4_moe::internal::cpu {
namespace {

bool runs_on_host() { return kAvx512Bf16Kernels.runs_on_host() && bf16_tiles_run_on_host(); }

}  // namespace

const Kernels kAmxKernels{
    .name = "amx",
    .backend_name = "cpu:amx",
    .requires_text = "AMX tiles with BF16, AVX512F, BW, VL, VBMI, VNNI and BF16",
    .runs_on_host = runs_on_host,
    .nvfp4 = {"amx_bf16_half_tiles", kNvfp4ChunkBytes, kTileRows, multiply_nvfp4},
    .int8_block = {"avx512vbmi_vnni_int8", kInt8ChunkBytes, 1, multiply_int8},
    .bf16 = {"amx_bf16_tiles", kBf16ChunkBytes, kTileRows, multiply_bf16, kIntegerChunkBytes},
    .fp8 = {"amx_e4m3_as_bf16_tiles", kBf16ChunkBytes, kTileRows, multiply_fp8},
    .nvfp4_operands = tile_nvfp4_operands,
    .int8_operands = int8_operands,
    .bf16_operands = bf16_operands,
    .single_row_operands = integer_blocks_of_row,
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
