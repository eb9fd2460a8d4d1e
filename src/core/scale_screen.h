// The errors of one block under many scales at once, in float: which scales may have the least
// error.
//
// A search must compare errors in double, which is slow. Errors in float, of a block scaled so that
// its largest value is 6, cost a few vector instructions a scale, and how far they may be from the
// real ones is known: the scales that survive hold every one that may be best, mostly one alone,
// and double decides among the rest.
#pragma once

#include <array>

#include "core/float_formats.h"

namespace nvfp4_moe::internal {

// A block as the screen sees it: magnitudes in units of a sixth of the largest one, and weights of
// squared errors relative to the largest weight.
struct ScreenedBlock {
  std::array<float, kBlockElems> magnitudes{};  // 0 to 6
  std::array<float, kBlockElems> weights{};     // 0 to 1
  bool weighted = false;                        // else weights are not read
  double weight_sum = 0;                        // 16 if not weighted
};

// A run of scales at a time; a scale is a number in the unit of ScreenedBlock::magnitudes.
inline constexpr int kScreenLanes = 16;
using ScreenLanes = std::array<float, kScreenLanes>;

// sum over i of weight_i (magnitude_i - scale * its nearest E2M1 magnitude)^2 for the first `count`
// scales, which lie in 2^-60 to 2^60; entries behind them may be written too.
void screen_errors(const ScreenedBlock& block, const ScreenLanes& scales, int count,
                   ScreenLanes& errors);

// A scale whose error in float lies above this is not the best, where `least` is the least error in
// float of any.
double screen_limit(const ScreenedBlock& block, double least);

}  // namespace nvfp4_moe::internal
