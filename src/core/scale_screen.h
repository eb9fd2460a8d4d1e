// The errors of one block under many scales at once, in float: which scales may have the least
// error.
//
// A search must compare errors in double, which is slow. Errors in float, of a block scaled so that
// its largest value is 6, cost a few vector instructions per scale, and their distance from the
// real ones is bounded. The scales that pass include every one that may be best. Mostly only one
// passes; otherwise double decides among them.
#pragma once

#include <array>

#include "core/float_formats.h"

namespace nvfp4_moe::internal {

// A block in the screen's units: magnitudes in sixths of the largest one, and weights of squared
// errors relative to the largest weight.
struct ScreenedBlock {
  std::array<float, kBlockElems> magnitudes{};  // 0 to 6
  std::array<float, kBlockElems> weights{};     // 0 to 1
  bool weighted = false;                        // if false, weights are not read
  double weight_sum = 0;                        // 16 if not weighted
};

// A group of scales screened together. A scale is a number in the unit of
// ScreenedBlock::magnitudes.
inline constexpr int kScreenLanes = 16;
using ScreenLanes = std::array<float, kScreenLanes>;

// Computes sum over i of weight_i (magnitude_i - scale * its nearest E2M1 magnitude)^2 for the
// first `count` scales, which are between 2^-60 and 2^60. Entries after them may be written too.
void screen_errors(const ScreenedBlock& block, const ScreenLanes& scales, int count,
                   ScreenLanes& errors);

// The largest float error that the best scale can have. `least` is the smallest float error of any
// scale.
double screen_limit(const ScreenedBlock& block, double least);

}  // namespace nvfp4_moe::internal
