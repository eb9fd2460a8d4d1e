// Compares results with expected ones. Used by the tests and by `verify`.
//
// Several metrics are used together. NaN instead of an expected number, or a number instead of an
// expected NaN, is always a failure. The bounds and their derivations are only here and in
// docs/explanation/numerics.md.
#pragma once

#include <cstdint>
#include <string>

#include "core/config.h"

namespace nvfp4_moe::internal {

struct Comparison {
  int64_t tokens = 0;
  int64_t channels = 0;
  double cosine = 1;       // over the whole batch
  double relative_l2 = 0;  // ||actual - expected|| / ||expected||, over the whole batch
  // a token's error over its own norm, or a tenth of the mean norm if that is larger
  double worst_token_l2 = 0;
  int64_t worst_token = -1;
  // an element's error over its token's rms (or a tenth of the mean rms if that is larger)
  double worst_element = 0;
  double max_abs = 0;  // the largest absolute error, and where it is
  int64_t max_token = -1;
  int64_t max_channel = -1;
  double max_expected = 0;
  double max_actual = 0;
  // finite on one side only, or NaN against Inf, or Inf against -Inf
  int64_t nonfinite_mismatches = 0;
  int64_t nonfinite_token = -1;  // the first of them
  int64_t nonfinite_channel = -1;
};
// Compares arrays, (tokens, channels) row-major. Elements that are NaN, or the same infinity, on
// both sides enter no metric. A token that should be all zero and is not has an infinite relative
// error.
//
// least_norm: a token's norm in these metrics is at least this. A token that is compared by itself
// has no mean norm of a batch, so its rows give it one (numerics.md, section 8). If the expected
// norm of the batch is below it, the cosine is not measured (1).
Comparison compare(const float* expected, const float* actual, int64_t tokens, int64_t channels,
                   double least_norm = 0);

// Limits of a whole layer against the reference, by config (docs/explanation/numerics.md derives
// them). More tokens give a tighter limit for the batch, and a slightly wider one for its worst
// token.
struct LayerLimits {
  double cosine = 0;
  double relative_l2 = 0;
  double worst_token_l2 = 0;
  double worst_element = 0;
};
LayerLimits layer_limits(const MoeConfig& config, int64_t tokens = 1);
// Limits of one token whose rows differ in size. A row of `inner` intermediate values that has a
// share p of the sum of all rows' squared norms gives inner / p; elements is the least over the
// rows. Rows of one size give top_k * intermediate_size, the number that layer_limits assumes.
LayerLimits token_limits(const MoeConfig& config, double elements);
// Empty if the comparison holds. Otherwise: which limit broke, by how much, and at which
// coordinates.
std::string broken_limit(const Comparison& comparison, const LayerLimits& limits);

// The bound (docs/explanation/numerics.md, section 7) of one GEMM output element, for every format
// if products are exact and added in fp32. sum_abs = alpha * sum |p|.
double gemm_bound(int64_t k, int64_t splits, double sum_abs, double half_ulp_of_output);
// The same for FP8 tensor cores of Hopper, which add 32 products at a time and cut off 13 bits
// below the largest.
double fp8_tensor_core_bound(int64_t k, int64_t splits, double sum_abs, double half_ulp_of_output);

}  // namespace nvfp4_moe::internal
