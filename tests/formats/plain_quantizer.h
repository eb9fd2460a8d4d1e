// The contract of the weight quantizer as plain double code: every decision is a comparison with a
// boundary of formats/grid.h. Shares no code with src/core.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/quantize.h"
#include "formats/grid.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

constexpr size_t kBlock = 16;

struct Quantized {
  std::vector<uint8_t> codes;   // one per element
  std::vector<uint8_t> scales;  // one per block
  QuantizeCounts counts;
  double sum_sq = 0, sum_sq_error = 0;
};

inline Quantized quantize(const std::vector<float>& x, int64_t rows, float s,
                          ScaleSearch search = ScaleSearch::kMax,
                          const std::vector<float>& weights = {}) {
  Quantized q;
  std::vector<uint8_t> packed(x.size() / 2, 0xAA);
  q.scales.assign(x.size() / kBlock, 0xAA);
  EXPECT_OK(quantize_weights(x, rows, static_cast<int64_t>(x.size()) / rows, s, search,
                             packed.data(), q.scales.data(), q.counts, &q.sum_sq, &q.sum_sq_error,
                             weights));
  for (const uint8_t byte : packed) {
    q.codes.push_back(byte & 15);
    q.codes.push_back(byte >> 4);
  }
  return q;
}

inline double block_amax(const float* x) {
  double amax = 0;
  for (size_t i = 0; i < kBlock; ++i) amax = std::max(amax, std::fabs(static_cast<double>(x[i])));
  return amax;
}

// The index of x's magnitude under a scale byte.
inline size_t magnitude_of(float x, size_t byte, double s) {
  if (byte == 0) return 0;
  return e2m1_grid().round_quotient(std::fabs(static_cast<double>(x)),
                                    e4m3_grid().magnitudes[byte] * s);
}
inline uint8_t code_of(float x, size_t byte, double s) {
  const unsigned sign = byte != 0 && std::signbit(x) ? 8 : 0;
  return static_cast<uint8_t>(magnitude_of(x, byte, s) | sign);
}

// The sum of squared errors, each times its weight.
inline double error_of(const float* x, size_t byte, double s, const float* weights = nullptr) {
  double sum = 0;
  for (size_t i = 0; i < kBlock; ++i) {
    const double quantized =
        e2m1_grid().magnitudes[magnitude_of(x[i], byte, s)] * e4m3_grid().magnitudes[byte] * s;
    const double error = std::fabs(static_cast<double>(x[i])) - quantized;
    sum += error * error * (weights == nullptr ? 1.0 : static_cast<double>(weights[i]));
  }
  return sum;
}

// The scale of kMax.
inline size_t max_scale(const float* x, double s) {
  return e4m3_grid().round_quotient(block_amax(x), 6.0 * s);
}

// The usual tensor scale of x.
inline float usual_scale(const std::vector<float>& x) {
  return tensor_scale_from_amax(static_cast<double>(row_amax(x)));
}

}  // namespace nvfp4_moe::internal::test
