// How far float is from the real error. Take a residual e = y - t g with y the scaled magnitude (at most 6), t the scale
// and g the E2M1 magnitude. y and t are off by two roundings each, t g and the difference by one more each, and t g is
// at most y + t/2; the search asks for no t above 48 (a scale whose quotients lie above 1/8), so each of these is below
// 64 * 2^-24. A quotient y/t that is off by two roundings may fall on the wrong side of a boundary, where both codes
// have residuals within 2 * 64 * 2^-24 of one another. All together a residual in float is within 2^-14 of the real one,
// with room to spare, and the root of the weighted sum of their squares within 2^-14 sqrt(sum of weights). The sum's own
// roundings are relative: 20 of 2^-24, below 2^-18 of its root.
#include "core/scale_screen.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace nvfp4_moe {
namespace {

constexpr double kResidualBound = 0x1p-14;
constexpr double kSumBound = 0x1p-18;

// kLanes scales at a time, a scale a lane, so that no sum goes across lanes. The nearest E2M1 magnitude of q: its step is
// 1/2 below 2, and 2^(exponent - 1) from there. Adding 2^(exponent + 22) to q leaves a multiple of that step, and
// taking it off again is exact. Ties may go to either side: their errors are equal.
template <int kLanes, bool kWeighted>
void errors_of(const ScreenedBlock& block, const ScreenLanes& scales, ScreenLanes& errors) {
  float inverse[kLanes], sums[kLanes] = {};
  for (int j = 0; j < kLanes; ++j) inverse[j] = 1.0f / scales[static_cast<size_t>(j)];
  for (size_t i = 0; i < kBlockElems; ++i) {
    const float y = block.magnitudes[i];
    const float w = kWeighted ? block.weights[i] : 1.0f;
    for (int j = 0; j < kLanes; ++j) {
      float q = y * inverse[j];
      q = q < 6.0f ? q : 6.0f;
      const float power = std::bit_cast<float>(std::bit_cast<int32_t>(q) & 0x7F800000);
      const float least = power > 1.0f ? power : 1.0f;
      const float shift = std::bit_cast<float>(std::bit_cast<int32_t>(least) + (22 << 23));
      const float g = (q + shift) - shift;
      const float e = y - g * scales[static_cast<size_t>(j)];
      sums[j] += kWeighted ? e * e * w : e * e;
    }
  }
  for (int j = 0; j < kLanes; ++j) errors[static_cast<size_t>(j)] = sums[j];
}

}  // namespace

void screen_errors(const ScreenedBlock& block, const ScreenLanes& scales, int count, ScreenLanes& errors) {
  if (block.weighted) return errors_of<kScreenLanes, true>(block, scales, errors);
  constexpr int kFew = 12;  // what an unweighted search needs at most where it is not among the least scales
  count <= kFew ? errors_of<kFew, false>(block, scales, errors) : errors_of<kScreenLanes, false>(block, scales, errors);
}

double saturation_error(const ScreenedBlock& block, double scale) {
  double sum = 0;
  for (size_t i = 0; i < kBlockElems; ++i) {
    const double beyond = block.magnitudes[i] - 6.0 * scale;
    if (beyond > 0) sum += beyond * beyond * (block.weighted ? static_cast<double>(block.weights[i]) : 1.0);
  }
  return sum;
}

double screen_limit(const ScreenedBlock& block, double least) {
  const double root = std::sqrt(least) * (1 + 2 * kSumBound) + 2 * kResidualBound * std::sqrt(block.weight_sum);
  return root * root;
}

}  // namespace nvfp4_moe
