// How far the float error is from the real one. Take a residual e = y - t g with y the scaled
// magnitude (at most 6), t the scale and g the E2M1 magnitude.
//
// - y and t are off by two roundings each, t g and the difference by one more each, and t g is at
//   most y + t/2. The search uses no t above 48 (a scale whose quotients are above 1/8), so each of
//   these is below 64 * 2^-24.
// - A quotient y/t that is off by two roundings may fall on the wrong side of a boundary. Both
//   codes then have residuals within 2 * 64 * 2^-24 of one another.
// - In total a residual in float is within 2^-14 of the real one, with room to spare. The root of
//   the weighted sum of their squares is within 2^-14 sqrt(sum of weights).
// - The sum's own roundings are relative: 20 of 2^-24, below 2^-18 of its root.
#include "core/scale_screen.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace nvfp4_moe::internal {
namespace {

constexpr double kResidualBound = 0x1p-14;
constexpr double kSumBound = 0x1p-18;

// Four scales at a time, one per lane, so that no sum goes across lanes. These are the compiler's
// vector types, since it turns arrays into scalar code.
using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));
constexpr int kWidth = 4;

// The nearest E2M1 magnitude of q, 0 to 6. The step is 1/2 below 2, and 2^(exponent - 1) from
// there. Adding 2^(exponent + 22) to q leaves a multiple of that step, and subtracting it again is
// exact. Ties may go to either side: their errors are equal.
inline Floats nearest_e2m1(Floats q) {
  const Floats one = {1.0f, 1.0f, 1.0f, 1.0f};
  const Floats power = std::bit_cast<Floats>(std::bit_cast<Ints>(q) & 0x7F800000);
  const Floats shift =
      std::bit_cast<Floats>(std::bit_cast<Ints>(power > one ? power : one) + (22 << 23));
  return (q + shift) - shift;
}

template <int kVectors, bool kWeighted>
void errors_of(const ScreenedBlock& block, const ScreenLanes& scales, ScreenLanes& errors) {
  const Floats six = {6.0f, 6.0f, 6.0f, 6.0f};
  Floats scale[kVectors], inverse[kVectors], sums[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    std::memcpy(&scale[v], scales.data() + v * kWidth, sizeof(Floats));
    inverse[v] = 1.0f / scale[v];
    sums[v] = Floats{};
  }
  for (size_t i = 0; i < kBlockElems; ++i) {
    const float y = block.magnitudes[i];
    const float w = block.weights[i];
    for (int v = 0; v < kVectors; ++v) {
      const Floats q = y * inverse[v];
      const Floats e = y - nearest_e2m1(q < six ? q : six) * scale[v];
      sums[v] += kWeighted ? e * e * w : e * e;
    }
  }
  std::memcpy(errors.data(), sums, sizeof(sums));
}

}  // namespace

void screen_errors(const ScreenedBlock& block, const ScreenLanes& scales, int count,
                   ScreenLanes& errors) {
  if (block.weighted) return errors_of<kScreenLanes / kWidth, true>(block, scales, errors);
  // the most scales of an unweighted search, unless they are among the smallest
  constexpr int kFew = 12;
  count <= kFew ? errors_of<kFew / kWidth, false>(block, scales, errors)
                : errors_of<kScreenLanes / kWidth, false>(block, scales, errors);
}

double screen_limit(const ScreenedBlock& block, double least) {
  const double root =
      std::sqrt(least) * (1 + 2 * kSumBound) + 2 * kResidualBound * std::sqrt(block.weight_sum);
  return root * root;
}

}  // namespace nvfp4_moe::internal
