// The one inner loop of the CPU backend: a panel of 16 weight rows times a tile of activation lines.
#pragma once

#include <cstdint>

#include "backend/host_layer.h"

namespace nvfp4_moe::cpu {

inline constexpr int64_t kTileLines = 16;

// Which activation lines a tile multiplies: line(i) = lines[i], i < count <= kTileLines.
struct LineTile {
  int64_t count = 0;
  int64_t line[kTileLines] = {};
};

// out (count, 16) = fl32(accumulator * alpha), alpha = fl32(line_scale * tensor_scale) under nvfp4, tensor_scale under
// bf16. Flagged lines come out as NaN. k is the length of a line.
// Rounding: within a block of 16 the W4A4 sum is exact, and four partial sums of four products are added under W4A16;
// blocks are added in order in fp32. So |err| <= (K/16 + 5) 2^-24 alpha sum|p|, within the contract's bound.
void gemm_tile(ActivationFormat format, const HostActivations& activations, const LineTile& tile, int64_t k,
               const uint8_t* panel, float tensor_scale, float (*out)[16]);

}  // namespace nvfp4_moe::cpu
