// The instruction set "amx": bf16 tiles for W4A4 and W4A16, 8-bit activations with fp32 scales (W4A8) as avx512bf16.
//
// A tile multiplication takes 16 lines x 16 weight rows x 32 of K in the time of some thirty vector instructions. Weights
// are decoded with their block scale folded in (bf16_avx512.h), a slice of a strip at a time and into one of two
// buffers, while the tiles work on the other; two by two tiles of accumulators take 32 lines and 32 weight rows.
//
// W4A4: activations carry their block scales as well, and tiles are half as deep, one block of 16. Sum and products of
// a block are then exact in fp32, in any order, and are added to the accumulator by one rounding, block after block:
// the bits of the integer kernels.
// W4A16: 16 pairs are added in two chains, the chains are added, and the sum is added to the accumulator:
// |err| <= (16 + K/32) 2^-24 sum|p|, inside the contract's bound from K = 64 on; below, tiles are half as deep here too.
// No line sees another, so results do not depend on count.
// The instruction takes subnormal inputs, products and sums as 0: an activation below 2^-116 counts as 0.
#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "backend/cpu/kernels.h"
#include "backend/cpu/prefetch.h"
#include "backend/cpu/target.h"
#include "core/float_formats.h"

NVFP4_MOE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,avx512bf16,amx-tile,amx-bf16")
namespace nvfp4_moe::cpu {
namespace {

// Each needs the one before it.
// clang-format off
#include "backend/cpu/vector_avx512.h"
#include "backend/cpu/operands_x86.h"
#include "backend/cpu/lines.h"
// clang-format on

constexpr bool kPermuteBytes = true;
inline __m512i permute_bytes(__m512i index, __m512i table) { return _mm512_permutexvar_epi8(index, table); }

#include "backend/cpu/int8_avx512.h"
// Behind it.
#include "backend/cpu/bf16_avx512.h"

// e2m1 * e4m3 of a line as bf16, in the order of pairs: low nibbles of four bytes, then their high nibbles.
void scaled_operands(const uint8_t* codes, const uint8_t* block_scales, int64_t k, std::byte* out) {
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                       -3.0f, -4.0f, -6.0f);
  const __m128i nibble = _mm_set1_epi8(15);
  const int64_t blocks = k / kBlockElems;
  for (int64_t b = 0; b < blocks; ++b) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + b * (kBlockElems / 2)));
    const __m128i low = _mm_and_si128(packed, nibble), high = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
    const __m512i index = _mm512_cvtepu8_epi32(_mm_unpacklo_epi32(low, high));
    const __m512 scaled =
        _mm512_mul_ps(_mm512_permutexvar_ps(index, values), _mm512_set1_ps(e4m3_to_float(block_scales[b])));
    const __m256i top = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(scaled), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + b * 32), top);
  }
  std::memset(out + blocks * 32, 0, static_cast<size_t>(chunks_of(k) * kBf16ChunkBytes - blocks * 32));
}

// A W4A4 line for tiles, and behind it for vpdpbusd, which is faster for few lines: how many an expert has is not known
// when operands are written, and both give the same bits.
constexpr int64_t kNvfp4ChunkBytes = kBf16ChunkBytes + kInt8ChunkBytes;
constexpr int64_t kFewLines = 8;

void tile_nvfp4_operands(const uint8_t* codes, const uint8_t* block_scales, int64_t k, std::byte* out) {
  scaled_operands(codes, block_scales, k, out);
  nvfp4_operands(codes, block_scales, k, out + chunks_of(k) * kBf16ChunkBytes);
}

// ---- tiles: 0..3 accumulators (lines, weight rows), 4 and 5 lines, 6 and 7 panels

constexpr int64_t kTileLines = 16;
constexpr int64_t kGroupLines = 2 * kTileLines;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Tiles of `first` and `second` lines (0: no second tile), `depth` pairs deep.
  TileConfig(int64_t first, int64_t second, int64_t depth) {
    second = std::max<int64_t>(second, 1);
    for (int tile = 0; tile < 4; ++tile) set(tile, tile < 2 ? first : second, 64);
    for (int tile = 4; tile < 6; ++tile) set(tile, tile < 5 ? first : second, 4 * depth);
    for (int tile = 6; tile < 8; ++tile) set(tile, depth, 64);
  }
  void set(int tile, int64_t tile_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

// The intrinsics do not say what they read and write of memory.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

template <int kPanels, int kTiles>
inline void clear() {
  _tile_zero(0);
  if constexpr (kPanels == 2) _tile_zero(1);
  if constexpr (kTiles == 2) _tile_zero(2);
  if constexpr (kTiles == 2 && kPanels == 2) _tile_zero(3);
}
template <int kPanels, int kTiles>
inline void load_sums(const float* acc) {  // (lines, kPanels * 16)
  constexpr int64_t kStride = kPanels * kPanelRows * 4;
  const float* second = acc + kTileLines * kPanels * kPanelRows;
  _tile_loadd(0, acc, kStride);
  if constexpr (kPanels == 2) _tile_loadd(1, acc + kPanelRows, kStride);
  if constexpr (kTiles == 2) _tile_loadd(2, second, kStride);
  if constexpr (kTiles == 2 && kPanels == 2) _tile_loadd(3, second + kPanelRows, kStride);
}
template <int kPanels, int kTiles>
inline void store_sums(float* acc) {
  constexpr int64_t kStride = kPanels * kPanelRows * 4;
  float* second = acc + kTileLines * kPanels * kPanelRows;
  _tile_stored(0, acc, kStride);
  if constexpr (kPanels == 2) _tile_stored(1, acc + kPanelRows, kStride);
  if constexpr (kTiles == 2) _tile_stored(2, second, kStride);
  if constexpr (kTiles == 2 && kPanels == 2) _tile_stored(3, second + kPanelRows, kStride);
  memory_barrier();
}
// Lines at `a`, line_bytes apart, times weights (depth pairs, kPanels * 16 rows).
template <int kPanels, int kTiles>
inline void multiply_tiles(const std::byte* a, int64_t line_bytes, const __m512bh* weights) {
  constexpr int64_t kStride = kPanels * 64;
  _tile_loadd(6, weights, kStride);
  _tile_loadd(4, a, line_bytes);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kTiles == 2) {
    _tile_loadd(5, a + kTileLines * line_bytes, line_bytes);
    _tile_dpbf16ps(2, 5, 6);
  }
  if constexpr (kPanels == 2) {
    _tile_loadd(7, weights + 1, kStride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTiles == 2) _tile_dpbf16ps(3, 5, 7);
  }
}

// ---- a strip: slices of weights, decoded one ahead

constexpr int64_t kSliceBlocks = 16;
struct alignas(64) Slices {
  __m512bh weights[2][kSliceBlocks * kBlockPairs * kStripPanels];  // (pairs, panels)
};

// Decodes slices one after another, each into the buffer that is not at work, spread evenly over the steps of the one
// before it.
template <int kPanels>
struct SliceDecoder {
  Slices& slices;
  Decoder<kPanels> decoder;
  int64_t end = 0;      // block
  int64_t of_steps = 1, blocks = 0, credit = 0;

  SliceDecoder(const Strip& strip, Slices& buffers) : slices(buffers), decoder(strip) {}
  const __m512bh* slice(int64_t first_block) const { return slices.weights[first_block / kSliceBlocks % 2]; }
  void begin(int64_t end_block, int64_t steps) {
    end = end_block;
    blocks = end_block - decoder.next;
    of_steps = steps;
    credit = 0;
  }
  void step() {
    for (credit += blocks; credit >= of_steps; credit -= of_steps) decode();
  }
  void finish() {
    while (decoder.next < end) decode();
  }
  void decode() {
    decoder.decode_next(slices.weights[decoder.next / kSliceBlocks % 2] +
                        decoder.next % kSliceBlocks * kBlockPairs * kPanels);
  }
};

// One slice times the lines of one group, depth pairs a step.
template <int kPanels, int kTiles>
inline void multiply_group(const std::byte* a, int64_t line_bytes, const __m512bh* weights, int64_t steps, int64_t depth,
                           SliceDecoder<kPanels>& ahead) {
  for (int64_t step = 0; step < steps; ++step) {
    multiply_tiles<kPanels, kTiles>(a + step * depth * 4, line_bytes, weights + step * depth * kPanels);
    ahead.step();
    memory_barrier();
  }
}

template <int kPanels>
void multiply_tiled(const Strip& strip, const OperandLines& lines, int64_t depth, float* acc) {
  const std::byte* first_line = lines.lines[0];
  const int64_t count = lines.count, line_bytes = count > 1 ? lines.lines[1] - first_line : 0;
  const int64_t groups = (count + kGroupLines - 1) / kGroupLines;
  const int64_t last_lines = count - (groups - 1) * kGroupLines;
  // Tiles that more than one group shares are full.
  const int64_t first = std::min(groups > 1 ? kTileLines : last_lines, kTileLines);
  const int64_t second = groups > 1 ? kTileLines : last_lines - first;
  const TileConfig config(first, second, depth);
  Slices slices;
  SliceDecoder<kPanels> ahead(strip, slices);
  const int64_t blocks = strip.chunks * kBlocksPerChunk;

  memory_barrier();
  _tile_loadconfig(&config);
  ahead.begin(std::min(kSliceBlocks, blocks), 1);
  ahead.finish();
  for (int64_t begin = 0; begin < blocks; begin += kSliceBlocks) {
    const int64_t end = std::min(begin + kSliceBlocks, blocks);
    const int64_t steps = (end - begin) * kBlockPairs / depth;
    ahead.begin(std::min(end + kSliceBlocks, blocks), groups * steps);
    for (int64_t g = 0; g < groups; ++g) {
      const std::byte* a = first_line + g * kGroupLines * line_bytes + begin * kBlockPairs * 4;
      float* sums = acc + g * kGroupLines * kPanels * kPanelRows;
      // Sums stay in tiles where they belong to one group only.
      const bool fresh = begin == 0, load = groups > 1 && !fresh, store = groups > 1 || end == blocks;
      if (g + 1 < groups || last_lines > kTileLines) {
        if (fresh) clear<kPanels, 2>();
        if (load) load_sums<kPanels, 2>(sums);
        multiply_group<kPanels, 2>(a, line_bytes, ahead.slice(begin), steps, depth, ahead);
        if (store) store_sums<kPanels, 2>(sums);
      } else {
        if (fresh) clear<kPanels, 1>();
        if (load) load_sums<kPanels, 1>(sums);
        multiply_group<kPanels, 1>(a, line_bytes, ahead.slice(begin), steps, depth, ahead);
        if (store) store_sums<kPanels, 1>(sums);
      }
    }
    ahead.finish();
    memory_barrier();
  }
  _tile_release();
}

void multiply_nvfp4(const Strip& strip, const OperandLines& lines, float* acc) {
  if (lines.count <= kFewLines) {
    const std::byte* few[kFewLines];
    for (int64_t i = 0; i < lines.count; ++i) few[i] = lines.lines[i] + chunks_of(lines.k) * kBf16ChunkBytes;
    return multiply_int8(strip, {.lines = few, .count = lines.count, .k = lines.k}, acc);
  }
  if (strip.panels == 1) return multiply_tiled<1>(strip, lines, kBlockPairs, acc);
  multiply_tiled<2>(strip, lines, kBlockPairs, acc);
}
void multiply_bf16(const Strip& strip, const OperandLines& lines, float* acc) {
  const int64_t depth = lines.k < kChunkK ? kBlockPairs : 2 * kBlockPairs;
  if (strip.panels == 1) return multiply_tiled<1>(strip, lines, depth, acc);
  multiply_tiled<2>(strip, lines, depth, acc);
}

}  // namespace
}  // namespace nvfp4_moe::cpu
NVFP4_MOE_TARGET_END

namespace nvfp4_moe::cpu {
namespace {

// Linux gives tiles to a process that asks for them (5.16 and later); threads inherit the permission.
bool tiles_are_permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
bool runs_here() {
  static const bool runs = kAvx512Bf16Kernels.runs_here() && __builtin_cpu_supports("amx-tile") &&
                           __builtin_cpu_supports("amx-bf16") && tiles_are_permitted();
  return runs;
}

}  // namespace

const Kernels kAmxKernels{
    .name = "amx",
    .backend_name = "cpu:amx",
    .requires_text = "AMX tiles with BF16, AVX512F, BW, VL, VBMI, VNNI and BF16",
    .runs_here = runs_here,
    .nvfp4 = {"amx_bf16_half_tiles", kNvfp4ChunkBytes, kTileLines, multiply_nvfp4},
    .int8_block = {"avx512vbmi_vnni_int8", kInt8ChunkBytes, 1, multiply_int8},
    .bf16 = {"amx_bf16_tiles", kBf16ChunkBytes, kTileLines, multiply_bf16},
    .nvfp4_operands = tile_nvfp4_operands,
    .int8_operands = int8_operands,
    .bf16_operands = bf16_operands,
    .swiglu = swiglu_lines,
    .round = round_lines,
    .amax = line_amax,
    .quantize = quantize_line,
    .quantize_int8 = quantize_line_int8,
    .to_bf16 = line_to_bf16,
    .combine = combine_tokens,
};

}  // namespace nvfp4_moe::cpu
#endif
