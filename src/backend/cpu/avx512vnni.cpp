// The instruction set "avx512vnni": vpdpbusd on 512-bit registers, W4A16 with fp32 multiply-adds.
//
// A lane is a row of the panel. Weights become u8 = 2w + 12 by a byte shuffle, activations are s8 broadcast four at a
// time, and a block of 16 is four vpdpbusd that start at the line's bias: D exactly, in 3 more instructions scaled and
// added. Two panels x two blocks of weights stay decoded in registers while all lines pass, so that decoding costs once
// per strip whatever the number of lines; the accumulators lie in L1.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "backend/cpu/avx512.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/prefetch.h"
#include "backend/cpu/target.h"
#include "core/float_formats.h"

NVFP4_MOE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512vnni")
namespace nvfp4_moe::cpu {
namespace {

// Each needs the one before it.
// clang-format off
#include "backend/cpu/vector_avx512.h"
#include "backend/cpu/operands_x86.h"
#include "backend/cpu/lines.h"
#include "backend/cpu/float_tile.h"
// clang-format on

inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
inline __m512i broadcast4(const void* p) {
  int32_t four = 0;
  std::memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}

// One block of a panel: u8 weights of k 0-3, 4-7, 8-11, 12-15 of each row, and the rows' block scales times 2^-8.
struct Block {
  __m512i weights[4];
  __m512 scale;
};

inline Block decode(const uint8_t* chunk, int64_t b, __m512i table) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i v0 = load512(chunk + b * kBlockCodesBytes), v1 = load512(chunk + b * kBlockCodesBytes + 64);
  Block block;
  block.weights[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(v0, nibble));
  block.weights[1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v0, 4), nibble));
  block.weights[2] = _mm512_shuffle_epi8(table, _mm512_and_si512(v1, nibble));
  block.weights[3] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v1, 4), nibble));
  // An E4M3 byte shifted by 7 is an fp16 number 2^-8 times as large, subnormals included.
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk + kChunkScalesOffset + b * kPanelRows));
  block.scale = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
  return block;
}

// acc + the line's block times kPanels panels' blocks.
template <int kPanels>
inline void add_block(const Block (&blocks)[kPanels], const Int8Block& line, __m512 (&acc)[kPanels]) {
  __m512i sum[kPanels];
  for (int p = 0; p < kPanels; ++p) sum[p] = _mm512_set1_epi32(line.bias);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i four = broadcast4(line.values + 4 * j);
    for (int p = 0; p < kPanels; ++p) sum[p] = _mm512_dpbusd_epi32(sum[p], blocks[p].weights[j], four);
  }
  const __m512 scale = _mm512_set1_ps(line.scale);
  for (int p = 0; p < kPanels; ++p)
    acc[p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[p]), _mm512_mul_ps(blocks[p].scale, scale), acc[p]);
}

template <int kPanels>
void multiply(const Strip& strip, const Int8Block* const* lines, int64_t count, float* acc) {
  const __m512i table =
      _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const int64_t panel_stride = strip.chunks * kChunkBytes;
  for (int64_t c = 0; c < strip.chunks; ++c) {
    for (int p = 0; p < kPanels; ++p) prefetch_ahead(strip, p, c);
    for (int pair = 0; pair < 2; ++pair) {
      Block even[kPanels], odd[kPanels];
      for (int p = 0; p < kPanels; ++p) {
        const uint8_t* chunk = strip.bytes + p * panel_stride + c * kChunkBytes;
        even[p] = decode(chunk, 2 * pair, table);
        odd[p] = decode(chunk, 2 * pair + 1, table);
      }
      const int64_t first = c * kBlocksPerChunk + 2 * pair;
      for (int64_t i = 0; i < count; ++i) {
        float* out = acc + i * kPanels * kPanelRows;
        __m512 sum[kPanels];
        for (int p = 0; p < kPanels; ++p)
          sum[p] = first == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(out + p * kPanelRows);
        add_block(even, lines[i][first], sum);
        add_block(odd, lines[i][first + 1], sum);
        for (int p = 0; p < kPanels; ++p) _mm512_storeu_ps(out + p * kPanelRows, sum[p]);
      }
    }
  }
}

}  // namespace

namespace avx512 {

void multiply_int8(const Strip& strip, const Int8Block* const* lines, int64_t count, float* acc) {
  if (strip.panels == 1) return multiply<1>(strip, lines, count, acc);
  multiply<2>(strip, lines, count, acc);
}

}  // namespace avx512
}  // namespace nvfp4_moe::cpu
NVFP4_MOE_TARGET_END

namespace nvfp4_moe::cpu {
namespace {

bool runs_here() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const Kernels kAvx512VnniKernels{
    .name = "avx512vnni",
    .backend_name = "cpu:avx512vnni",
    .requires_text = "AVX512F, BW, VL and VNNI",
    .runs_here = runs_here,
    .int8_gemm = "avx512vnni_int8",
    .float_gemm = "avx512_fp32",
    .nvfp4_operands = nvfp4_operands,
    .float_operands = fp32_operands,
    .float_chunk_bytes = kChunkK * static_cast<int64_t>(sizeof(float)),
    .multiply_int8 = avx512::multiply_int8,
    .multiply_float = multiply_fp32,
    .swiglu = swiglu_lines,
    .round = round_lines,
    .amax = line_amax,
    .quantize = quantize_line,
    .to_bf16 = line_to_bf16,
    .combine = combine_tokens,
};

}  // namespace nvfp4_moe::cpu
#endif
