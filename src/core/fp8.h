// activation_format fp8: how NVFP4 weights become E4M3. docs/explanation/numerics.md, section 3,
// has the definition.
//
// w8 = e4m3(e2m1(code) * e4m3(block scale) * 2^-shift): one rounding, to nearest even, subnormals
// kept. Each matrix of an expert has its own shift: the smallest integer that brings its largest
// block scale times 6 to at most 448. Its power of two goes into alpha, with the tensor scale of
// the same matrix.
#pragma once

#include <cstdint>

#include "core/nvfp4_view.h"

namespace nvfp4_moe::internal {

// 6 * 448 needs 3. 6 * 2^-9, of the smallest block scale, fits 15 octaves up.
inline constexpr int kFp8LeastShift = -15, kFp8MostShift = 3;

// Decisions and counts of packing for one matrix.
struct Fp8Weights {
  int32_t shift = 0;
  uint64_t inexact = 0;  // weights that w8 rounds: w8 * 2^shift is not e2m1 * e4m3

  bool operator==(const Fp8Weights&) const = default;
};

// The shift of a matrix. largest: its largest block scale, a valid byte. 0 if all its scales are 0.
int fp8_weight_shift(uint8_t largest);

// The E4M3 byte of a code 0..15 under a valid block scale byte.
uint8_t fp8_weight(uint8_t code, uint8_t block_scale, int shift);

// Reads the whole matrix. Its block scales are valid.
Fp8Weights measure_fp8_weights(const Nvfp4View& matrix);

}  // namespace nvfp4_moe::internal
