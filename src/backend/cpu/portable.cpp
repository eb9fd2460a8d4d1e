// The instruction set "portable": plain C++ in the order that all others follow. Runs anywhere.
//
// int8 row x u4 panel, per block of 16: D = sum (2w)(2a) exactly, then acc = fma(D, weight scale *
// row scale, acc).
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "backend/cpu/kernels.h"
#include "backend/cpu/prefetch.h"
#include "core/float_formats.h"

namespace nvfp4_moe::internal::cpu {
namespace {

#include "backend/cpu/vector_portable.h"

constexpr std::array<int8_t, 16> kDoubled = {0, 1,  2,  3,  4,  6,  8,  12,
                                             0, -1, -2, -3, -4, -6, -8, -12};

inline void int8_block_values(const uint8_t* codes, Int8Block& out) {
  int32_t sum = 0;
  for (int i = 0; i < kBlockElems; ++i) {
    out.values[i] = kDoubled[codes[i / 2] >> (i % 2 * 4) & 15];
    sum += out.values[i];
  }
  out.bias = -12 * sum;
}

// The order matters: each needs the ones before it.
// clang-format off
#include "backend/cpu/gelu_situ_rows.h"
#include "backend/cpu/rows.h"
#include "backend/cpu/float_block.h"
#include "backend/cpu/float_small_batch.h"
#include "backend/cpu/float_tile.h"
// clang-format on

// One block of a panel: rows of doubled weights by k, and the block scales times 2^-8.
struct Block {
  int16_t weights[kBlockElems][kPanelRows];
  F scale;
};

void decode_block(const uint8_t* chunk, int64_t b, Block& block) {
  const uint8_t* codes = chunk + b * kBlockCodesBytes;
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      for (int64_t j = 0; j < 4; ++j) {
        const uint8_t pair = codes[half * 64 + r * 4 + j];
        block.weights[half * 8 + j][r] = kDoubled[low_code(pair)];
        block.weights[half * 8 + 4 + j][r] = kDoubled[high_code(pair)];
      }
    }
  }
  block.scale =
      e4m3_values(load_bytes(chunk + kChunkScalesOffset + b * kPanelRows)) * splat(0x1p-8f);
}

void multiply_int8(const Strip& strip, const OperandRows& rows, float* acc) {
  const int64_t count = rows.count;
  const int64_t acc_stride = strip.panels * kPanelRows;
  std::fill(acc, acc + count * acc_stride, 0.0f);
  Block block;
  for (int64_t p = 0; p < strip.panels; ++p) {
    for (int64_t b = 0; b < strip.chunks * kBlocksPerChunk; ++b) {
      decode_block(strip.bytes + (p * strip.chunks + b / kBlocksPerChunk) * kChunkBytes,
                   b % kBlocksPerChunk, block);
      for (int64_t i = 0; i < count; ++i) {
        const Int8Block& row = int8_blocks(rows.rows[i])[b];
        I sum = splat(0);
        for (int k = 0; k < kBlockElems; ++k)
          for (int r = 0; r < kLanes; ++r)
            sum.v[r] += static_cast<uint32_t>(block.weights[k][r] * row.values[k]);
        float* out = acc + i * acc_stride + p * kPanelRows;
        store(out, fma(to_float(sum), block.scale * splat(row.scale), load(out)));
      }
    }
  }
}

bool runs_on_host() { return true; }

}  // namespace

const Kernels kPortableKernels{
    .name = "portable",
    .backend_name = "cpu:portable",
    .requires_text = "nothing",
    .runs_on_host = runs_on_host,
    .nvfp4 = {"portable_int8", kInt8ChunkBytes, 1, multiply_int8},
    .int8_block = {"portable_int8", kInt8ChunkBytes, 1, multiply_int8},
    .bf16 = {"portable_fp32", kFloatChunkBytes, 1, multiply_fp32},
    .fp8 = {"portable_fp32_e4m3", kFloatChunkBytes, 1, multiply_fp8},
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
