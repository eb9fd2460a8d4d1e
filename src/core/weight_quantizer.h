// Quantizer of weight blocks under one tensor scale: the codes under a block scale, and the
// searches for block scales.
//
// Two facts make the definition in double fast.
//
// - amax/(6s) and x/(vs) are quotients of a 24-bit by an at most 31-bit significand. They cannot
//   come within double rounding of an E4M3 or E2M1 boundary without being equal to it. So "in
//   double, rounded once" is the exact rounding of the real quotient.
// - The boundaries t*v*s are exact in double, and for a float x both x > t and x >= t equal x >
//   theta for one float theta. There are only 126 scales v, so a table of thetas per tensor leaves
//   seven float comparisons per element and no division.
#pragma once

#include <array>
#include <cstdint>

#include "core/quantize.h"

namespace nvfp4_moe::internal {

// Consecutive scale bytes that include the best one.
struct ScaleRange {
  int bottom = 1;
  int top = 0;
};

class WeightQuantizer {
 public:
  explicit WeightQuantizer(float tensor_scale);

  // The scale of kMax.
  uint8_t scale(float amax) const;
  bool scale_saturates(float amax) const;
  // Computes the codes, one per byte, of a block under a scale that is not 0. Returns the number of
  // quotients above 6.
  int codes(const float* x, uint8_t byte, uint8_t* out) const;
  // Sum of (x - decoded)^2, each times its weight if there are weights (16, or null).
  double squared_error(const float* x, uint8_t byte, const uint8_t* block_codes,
                       const float* weights = nullptr) const;
  // The scale that `search` selects for a block; amax is the block's. weights: as above.
  uint8_t search_scale(ScaleSearch search, const float* x, float amax, const float* weights) const;

 private:
  struct Best;
  uint8_t best_neighbour(const float* x, float amax, const float* weights,
                         uint8_t max_scale_byte) const;
  uint8_t best_of_sweep(const float* x, float amax, const float* weights,
                        uint8_t max_scale_byte) const;
  ScaleRange sweep_range(double amax) const;
  // max_error: the error of the scale of kMax, without weights.
  ScaleRange weighted_range(double amax, double max_error) const;
  // Whether a block's largest magnitude exceeds what rounding its scale explains.
  bool clips(double amax, int byte) const;
  double error_under(const float* x, uint8_t byte, const float* weights) const;

  float tensor_scale_;
  double six_s_;
  std::array<std::array<float, 8>, 127> thresholds_{};  // by scale byte; row 0 unused
};

}  // namespace nvfp4_moe::internal
