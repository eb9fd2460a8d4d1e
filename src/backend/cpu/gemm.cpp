// Portable C++: decodes a 64-K chunk of the panel to float once per tile, then runs all lines over it. The loops over
// 16 rows are the vector loops.
#include "backend/cpu/gemm.h"

#include <algorithm>
#include <array>
#include <limits>

#include "backend/cpu/panel.h"
#include "core/float_formats.h"

namespace nvfp4_moe::cpu {
namespace {

constexpr int kRows = static_cast<int>(kPanelRows);

// A code byte as its two values.
struct CodePair {
  float low, high;
};
const std::array<CodePair, 256>& code_pairs() {
  static const auto table = [] {
    std::array<CodePair, 256> pairs{};
    for (int byte = 0; byte < 256; ++byte)
      pairs[static_cast<size_t>(byte)] = {e2m1_to_float(low_code(static_cast<uint8_t>(byte))),
                                          e2m1_to_float(high_code(static_cast<uint8_t>(byte)))};
    return pairs;
  }();
  return table;
}

// One chunk of a panel, decoded.
struct Chunk {
  float weights[kChunkK][kRows];         // E2M1 values
  float scales[kBlocksPerChunk][kRows];  // E4M3 values
};

void decode_chunk(const uint8_t* packed, Chunk& chunk) {
  const auto& pairs = code_pairs();
  for (int64_t half = 0; half < 2 * kBlocksPerChunk; ++half) {
    const uint8_t* vector = packed + half * 64;  // 16 lanes of 4 bytes: k = 8 half + 0..3 low, + 4..7 high
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < 4; ++j) {
        const CodePair pair = pairs[vector[r * 4 + j]];
        chunk.weights[half * 8 + j][r] = pair.low;
        chunk.weights[half * 8 + 4 + j][r] = pair.high;
      }
    }
  }
  for (int64_t b = 0; b < kBlocksPerChunk; ++b)
    for (int r = 0; r < kRows; ++r) chunk.scales[b][r] = e4m3_to_float(packed[kChunkScalesOffset + b * kRows + r]);
}

// sum over the block of w[k][r] a[k] for the 16 rows: four partial sums of four, so that the W4A16 error stays small.
void block_dot(const float (*w)[kRows], const float* a, float* sum) {
  float partial[4][kRows];
  for (int q = 0; q < 4; ++q)
    for (int r = 0; r < kRows; ++r) partial[q][r] = w[4 * q][r] * a[4 * q];
  for (int q = 0; q < 4; ++q)
    for (int j = 1; j < 4; ++j)
      for (int r = 0; r < kRows; ++r) partial[q][r] += w[4 * q + j][r] * a[4 * q + j];
  for (int r = 0; r < kRows; ++r) sum[r] = (partial[0][r] + partial[1][r]) + (partial[2][r] + partial[3][r]);
}

// The line's 16 values of a block; under nvfp4 as E2M1 values, without any scale.
void load_block(ActivationFormat format, const HostActivations& activations, int64_t line, int64_t k, int64_t begin,
                float* values) {
  if (format == ActivationFormat::kNvfp4) {
    const uint8_t* codes = activations.codes + (line * k + begin) / 2;
    const auto& pairs = code_pairs();
    for (int i = 0; i < kBlockElems / 2; ++i) {
      values[2 * i] = pairs[codes[i]].low;
      values[2 * i + 1] = pairs[codes[i]].high;
    }
  } else {
    const uint16_t* bits = activations.bf16 + line * k + begin;
    for (int i = 0; i < kBlockElems; ++i) values[i] = bf16_to_float(bits[i]);
  }
}

}  // namespace

void gemm_tile(ActivationFormat format, const HostActivations& activations, const LineTile& tile, int64_t k,
               const uint8_t* panel, float tensor_scale, float (*out)[16]) {
  const bool nvfp4 = format == ActivationFormat::kNvfp4;
  float acc[kTileLines][kRows] = {};
  Chunk chunk;
  for (int64_t c = 0; c < chunks_of(k); ++c) {
    decode_chunk(panel + c * kChunkBytes, chunk);
    const int64_t blocks = std::min(kBlocksPerChunk, (k - c * kChunkK) / kBlockElems);
    for (int64_t i = 0; i < tile.count; ++i) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t begin = c * kChunkK + b * kBlockElems;
        float a[kBlockElems], sum[kRows];
        load_block(format, activations, tile.line[i], k, begin, a);
        block_dot(chunk.weights + b * kBlockElems, a, sum);
        const float line_block_scale =
            nvfp4 ? e4m3_to_float(activations.block_scales[(tile.line[i] * k + begin) / kBlockElems]) : 1.0f;
        for (int r = 0; r < kRows; ++r) acc[i][r] += sum[r] * (chunk.scales[b][r] * line_block_scale);
      }
    }
  }
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t line = tile.line[i];
    const double line_scale = nvfp4 ? static_cast<double>(activations.line_scale[line]) : 1.0;
    const float alpha = static_cast<float>(line_scale * static_cast<double>(tensor_scale));
    const bool spoiled = activations.nonfinite[line] != 0;
    for (int r = 0; r < kRows; ++r) out[i][r] = spoiled ? std::numeric_limits<float>::quiet_NaN() : acc[i][r] * alpha;
  }
}

}  // namespace nvfp4_moe::cpu
