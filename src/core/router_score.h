// Router arithmetic that hosts and devices share: keys that order scores, the scoring functions, a
// weight.
//
// Floats and doubles of IEEE 754 in the order written here, with one e^x (core/exp.h), so that the
// bits are the same everywhere. docs/explanation/numerics.md, section 12 derives how far they are
// from real numbers.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/exp.h"
#include "core/host_device.h"
#include "core/router.h"

namespace nvfp4_moe::internal::router {

// Keys are unsigned integers that grow with x; -0 has the key of 0. kRemovedKey < kNanKey < the key
// of -Inf < ... < the key of Inf.
inline constexpr uint32_t kRemovedKey = 0, kNanKey = 1;

NVFP4_MOE_HOST_DEVICE inline uint32_t key_of(float x) {
  if (x != x) return kNanKey;
  if (x == 0.0f) x = 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
// The float of a key; NaN for kNanKey and kRemovedKey.
NVFP4_MOE_HOST_DEVICE inline float value_of(uint32_t key) {
  const uint32_t bits = key <= kNanKey ? 0x7FC00000u : (key >> 31) != 0 ? key & 0x7FFFFFFFu : ~key;
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

// The experts of a warp's lane: lane l has the experts of [l v, (l + 1) v), v a power of two. It is
// part of the contract on hosts too, since the softmax denominator is added up by lanes.
NVFP4_MOE_HOST_DEVICE inline int experts_a_lane(int64_t num_experts) {
  int v = 1;
  while (32 * v < num_experts) v *= 2;
  return v;
}

// log(1 + u) for u in [0, 1]: 2 atanh(z) by its series, z = u / (2 + u) <= 1/3, to z^27: within
// 2^-47 of it, relatively.
NVFP4_MOE_HOST_DEVICE inline double log1p_same_everywhere(double u) {
  const double z = u / (2.0 + u);
  const double w = z * z;
  double sum = w * (1.0 / 27.0) + 1.0 / 25.0;
  sum = sum * w + 1.0 / 23.0;
  sum = sum * w + 1.0 / 21.0;
  sum = sum * w + 1.0 / 19.0;
  sum = sum * w + 1.0 / 17.0;
  sum = sum * w + 1.0 / 15.0;
  sum = sum * w + 1.0 / 13.0;
  sum = sum * w + 1.0 / 11.0;
  sum = sum * w + 1.0 / 9.0;
  sum = sum * w + 1.0 / 7.0;
  sum = sum * w + 1.0 / 5.0;
  sum = sum * w + 1.0 / 3.0;
  sum = sum * w + 1.0;
  return 2.0 * z * sum;
}

// Below this, sqrt(log(1 + e^x)) is e^(x/2) (1 - e^x / 4), which is e^(x/2) to 2^-30. e^(x/2) is
// also farther from underflow.
inline constexpr float kSoftplusTail = -20.0f;

// The score of a logit; for softmax its numerator e^(x - largest). Only softmax reads largest.
NVFP4_MOE_HOST_DEVICE inline float score_of(Scoring scoring, float x, float largest) {
  const bool tail = scoring == Scoring::kSqrtSoftplus && x < kSoftplusTail;
  const float magnitude = x < 0.0f ? -x : x;
  const float u = exp_same_everywhere(scoring == Scoring::kSoftmax ? x - largest
                                      : tail                       ? 0.5f * x
                                                                   : -magnitude);
  if (scoring == Scoring::kSoftmax || tail) return u;
  if (scoring == Scoring::kSigmoid) return (x < 0.0f ? u : 1.0f) / (1.0f + u);
  const double softplus =
      (x > 0.0f ? static_cast<double>(x) : 0.0) + log1p_same_everywhere(static_cast<double>(u));
  return static_cast<float>(::sqrt(softplus));
}

// A weight from its score: divided if `divide` is set (a divisor of 0 is allowed), scaled, rounded
// once. Any NaN becomes the same NaN. factor: the router's, times the expert's scale if it has one;
// the product of two floats is exact.
NVFP4_MOE_HOST_DEVICE inline float weight_of(float score, bool divide, double divisor,
                                             double factor, bool nonfinite) {
  const double numerator = static_cast<double>(score);
  const float weight = static_cast<float>((divide ? numerator / divisor : numerator) * factor);
  return nonfinite || weight != weight ? value_of(kNanKey) : weight;
}

}  // namespace nvfp4_moe::internal::router
