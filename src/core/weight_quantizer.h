// One tensor scale's quantizer of weight blocks: the codes under a block scale, and the searches
// for block scales.
//
// Two facts make the definition in double fast. (1) amax/(6s) and x/(vs) have quotients of a 24-bit
// by an at most 31-bit significand, which cannot come within double rounding of an E4M3 or E2M1
// boundary without lying on it: so "in double, rounded once" is the exact rounding of the real
// quotient. (2) The boundaries t*v*s are exact in double, and for a float x both x > t and x >= t
// equal x > theta for one float theta. There are only 126 scales v, so a table of thetas per tensor
// leaves seven float comparisons per element and no division.
#pragma once

#include <array>
#include <cstdint>

#include "core/quantize.h"

namespace nvfp4_moe::internal {

// Consecutive scale bytes, among which the best one lies.
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
  // Codes, one per byte, of a block under a scale that is not 0; returns how many quotients lie
  // above 6.
  int codes(const float* x, uint8_t byte, uint8_t* out) const;
  // sum (x - decoded)^2, each times its weight if there are weights (16, or null).
  double squared_error(const float* x, uint8_t byte, const uint8_t* block_codes,
                       const float* weights = nullptr) const;
  // The scale that `search` gives a block; amax is its own. weights: as above.
  uint8_t search_scale(ScaleSearch search, const float* x, float amax, const float* weights) const;

 private:
  struct Best;
  uint8_t best_neighbour(const float* x, float amax, const float* weights,
                         uint8_t max_scale_byte) const;
  uint8_t best_of_sweep(const float* x, float amax, const float* weights,
                        uint8_t max_scale_byte) const;
  ScaleRange sweep_range(double amax) const;
  // max_error: of the scale of kMax, without weights.
  ScaleRange weighted_range(double amax, double max_error) const;
  // Whether a block's largest magnitude lies beyond what rounding its scale explains.
  bool clips(double amax, int byte) const;
  double error_under(const float* x, uint8_t byte, const float* weights) const;

  float tensor_scale_;
  double six_s_;
  std::array<std::array<float, 8>, 127> thresholds_{};  // by scale byte; row 0 unused
};

}  // namespace nvfp4_moe::internal
