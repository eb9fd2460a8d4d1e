// The comparisons and their limits. docs/explanation/numerics.md, "Limits of a whole layer",
// derives every number here; change both or neither.
#include "judge/judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace nvfp4_moe::internal {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A token's error is relative to its own norm, or to a tenth of the mean norm if that is larger,
// since a large relative error of a token that cancels to nothing means nothing.
constexpr double kNormFloor = 0.1;

// Rms of one bf16 ulp relative to the rms of values spread evenly over a binade: 2^-7 / sqrt(7/3).
const double kBf16Step = 0x1p-7 / std::sqrt(7.0 / 3.0);
// Mean |d| of a Gaussian of rms 1.
const double kMeanAbs = std::sqrt(2.0 / M_PI);

// The squared error that one event adds to a row, in units of one element's mean square: on
// average, and at most. An event is a code or a block scale that falls on the other side of a tie.
// kEventsPerError is events per element and relative error of SwiGLU.
constexpr double kEventMean = 0.14;
constexpr double kEventMost = 1.0;
constexpr double kEventsPerError = 3.0;
// The same under int8_block. A block's step is 1/127 of its amax, so an event (a code, or the scale
// of a whole block, that falls on the other side) is small but not rare. Its mean worth is given
// per unit of error. At most, all elements of one block differ by a step of an amax that is 5.6
// times the rms.
constexpr double kInt8WorthPerError = 0.025;
constexpr double kInt8EventMost = 1.0 / 32.0;
// The same under fp8. A step of E4M3 is at most an eighth of the element, so by Cauchy-Schwarz mean
// |d| step is at most an eighth of the rms of d. An element of eight times the rms is worth 1.
constexpr double kFp8WorthPerError = 0.125;
constexpr double kFp8EventMost = 1.0;
// If a row's largest element crosses 448 2^e, the row's scale doubles. Elements that are subnormal
// under either scale may then move, each by at most that largest element over 152917 (448 over 1.5
// * 2^-9).
constexpr double kFp8ScaleStep = 448.0 / (1.5 * 0x1p-9);
// A bound is broken by chance in one batch of e^21, about 10^9.
constexpr double kLogOdds = 21.0;

// Rms error of gemm1's gate and up together, relative to their own rms: (K/16 + 1) 2^-25 of sum|p|,
// which is (2/pi) sqrt(K) of the rms on signed data; twice, for gate and up. A bias is one more
// addition.
double gemm1_relative_error(int64_t k, bool biased) {
  const double n = static_cast<double>(k);
  return 2.0 * (n / 16.0 + (biased ? 2.0 : 1.0)) * 0x1p-25 * (2.0 / M_PI) * std::sqrt(n);
}

// The same under fp8, for one GEMM: FP8 tensor cores of Hopper err by 2^-14.2 of sum|p| rms on
// signed data.
double fp8_relative_error(int64_t k) {
  return std::exp2(-14.2) * (2.0 / M_PI) * std::sqrt(static_cast<double>(k));
}

// Squared error from flipped codes and scales of the second quantization.
struct Flips {
  double worth_per_error = 0;  // per intermediate element, on average, times gemm1's relative error
  double most = 0;             // of one event
};
Flips flips_of(ActivationFormat format) {
  switch (format) {
    case ActivationFormat::kNvfp4: return {kEventsPerError * kEventMean, kEventMost};
    case ActivationFormat::kInt8Block: return {kInt8WorthPerError, kInt8EventMost};
    case ActivationFormat::kFp8: return {kFp8WorthPerError, kFp8EventMost};
    case ActivationFormat::kBf16: break;
  }
  return {};  // nothing is quantized
}

// Bernstein's bound on the flips' share of the output's squared norm, over `elements` intermediate
// values.
double flip_share(const Flips& flips, double elements, double relative_error, double log_odds) {
  const double mean = flips.worth_per_error * relative_error * elements;
  const double worst =
      mean + std::sqrt(2.0 * mean * flips.most * log_odds) + flips.most * log_odds / 3.0;
  return worst / elements;
}

double ratio(double error, double norm) {
  return error == 0 ? 0 : norm > 0 ? error / norm : kInfinity;
}

}  // namespace

Comparison compare(const float* expected, const float* actual, int64_t tokens, int64_t channels,
                   double least_norm) {
  Comparison result;
  result.tokens = tokens;
  result.channels = channels;
  std::vector<double> norms(static_cast<size_t>(tokens)), errors(static_cast<size_t>(tokens));
  std::vector<double> largest(static_cast<size_t>(tokens));
  double dot = 0, expected_sq = 0, actual_sq = 0, error_sq = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    double token_sq = 0, token_error_sq = 0, token_largest = 0;
    for (int64_t c = 0; c < channels; ++c) {
      const double e = expected[t * channels + c], a = actual[t * channels + c];
      if (!std::isfinite(e) || !std::isfinite(a)) {
        // Non-finite values agree only if they are the same: NaN and NaN, or the same infinity.
        const bool same = (std::isnan(e) && std::isnan(a)) || e == a;
        if (!same && result.nonfinite_mismatches++ == 0) {
          result.nonfinite_token = t;
          result.nonfinite_channel = c;
        }
        continue;
      }
      const double error = std::fabs(a - e);
      if (error > result.max_abs || result.max_token < 0) {
        result.max_abs = error;
        result.max_token = t;
        result.max_channel = c;
        result.max_expected = e;
        result.max_actual = a;
      }
      token_largest = std::max(token_largest, error);
      token_sq += e * e;
      token_error_sq += error * error;
      dot += e * a;
      actual_sq += a * a;
    }
    expected_sq += token_sq;
    error_sq += token_error_sq;
    norms[static_cast<size_t>(t)] = std::sqrt(token_sq);
    errors[static_cast<size_t>(t)] = std::sqrt(token_error_sq);
    largest[static_cast<size_t>(t)] = token_largest;
  }

  const auto used = std::count_if(norms.begin(), norms.end(), [](double n) { return n > 0; });
  double sum = 0;
  for (double n : norms) sum += n;
  const double floor = used > 0 ? kNormFloor * sum / static_cast<double>(used) : 0;
  for (size_t t = 0; t < norms.size(); ++t) {
    // There is no floor for a token that must be exactly zero.
    const double own = norms[t] > 0 ? std::max(norms[t], floor) : 0;
    const double norm = std::max(own, least_norm);
    const double error = ratio(errors[t], norm);
    if (error > result.worst_token_l2 || result.worst_token < 0) {
      result.worst_token_l2 = error;
      result.worst_token = static_cast<int64_t>(t);
    }
    result.worst_element = std::max(
        result.worst_element, ratio(largest[t], norm / std::sqrt(static_cast<double>(channels))));
  }
  result.relative_l2 = ratio(std::sqrt(error_sq), std::max(std::sqrt(expected_sq), least_norm));
  if (std::sqrt(expected_sq) < least_norm)
    result.cosine = 1;
  else if (expected_sq > 0 && actual_sq > 0)
    result.cosine = dot / (std::sqrt(expected_sq) * std::sqrt(actual_sq));
  else
    result.cosine = expected_sq == actual_sq ? 1 : 0;
  return result;
}

namespace {

// elements: intermediate values that events are counted over, of all tokens and of one.
LayerLimits limits_over(const MoeConfig& config, double count, double elements,
                        double token_elements) {
  // Three roundings to bf16 (intermediate, row, output): sqrt(kMeanAbs e step) has its fixed point
  // at kMeanAbs * step, and no token can lose more than one largest ulp (2^-7) at each of the
  // three.
  double batch_sq = std::pow(kMeanAbs * kBf16Step, 2);
  double token_sq = 3.0 * std::pow(0x1p-7, 2);
  if (count == 1) batch_sq = token_sq;
  const Flips flips = flips_of(config->activation_format);
  const bool fp8 = config->activation_format == ActivationFormat::kFp8;
  double error = gemm1_relative_error(config->hidden_size, config->expert_biases);
  if (fp8) error = std::max(error, 2.0 * fp8_relative_error(config->hidden_size));
  batch_sq += flip_share(flips, elements, error, kLogOdds);
  token_sq += flip_share(flips, token_elements, error, kLogOdds + std::log(count));
  if (fp8) {
    const double rescaled =
        static_cast<double>(config->intermediate_size) / (kFp8ScaleStep * kFp8ScaleStep);
    const double sums =
        std::pow(error, 2) + std::pow(fp8_relative_error(config->intermediate_size), 2);
    batch_sq += rescaled + sums;
    token_sq += rescaled + sums;
  }
  LayerLimits limits;
  limits.relative_l2 = std::sqrt(batch_sq);
  limits.cosine = 1.0 - batch_sq;  // cos >= sqrt(1 - e^2) >= 1 - e^2
  limits.worst_token_l2 = std::sqrt(token_sq);
  limits.worst_element = 6.0 * limits.worst_token_l2;
  return limits;
}

}  // namespace

LayerLimits layer_limits(const MoeConfig& config, int64_t tokens) {
  const double count = static_cast<double>(std::max<int64_t>(tokens, 1));
  const double elements =
      static_cast<double>(config->top_k) * static_cast<double>(config->intermediate_size);
  return limits_over(config, count, elements * count, elements);
}

LayerLimits token_limits(const MoeConfig& config, double elements) {
  return limits_over(config, 1, elements, elements);
}

std::string broken_limit(const Comparison& comparison, const LayerLimits& limits) {
  const std::string where =
      comparison.max_token < 0
          ? std::string()
          : fmt::format(
                "; largest error {:.4g} at token {} channel {}: expected {:.6g}, got {:.6g}",
                comparison.max_abs, comparison.max_token, comparison.max_channel,
                comparison.max_expected, comparison.max_actual);
  if (comparison.nonfinite_mismatches > 0)
    return fmt::format("{} elements differ in being finite, the first at token {} channel {}{}",
                       comparison.nonfinite_mismatches, comparison.nonfinite_token,
                       comparison.nonfinite_channel, where);
  // Written as !(x <= limit), so that a NaN metric breaks its limit.
  if (!(comparison.relative_l2 <= limits.relative_l2))
    return fmt::format("relative L2 {:.4g}, limit {:.4g}{}", comparison.relative_l2,
                       limits.relative_l2, where);
  if (!(comparison.cosine >= limits.cosine))
    return fmt::format("cosine {:.8f}, limit {:.8f}{}", comparison.cosine, limits.cosine, where);
  if (!(comparison.worst_token_l2 <= limits.worst_token_l2))
    return fmt::format("token {} relative L2 {:.4g}, limit {:.4g}{}", comparison.worst_token,
                       comparison.worst_token_l2, limits.worst_token_l2, where);
  if (!(comparison.worst_element <= limits.worst_element))
    return fmt::format("worst element {:.4g} of its token's rms, limit {:.4g}{}",
                       comparison.worst_element, limits.worst_element, where);
  return {};
}

double gemm_bound(int64_t k, int64_t splits, double sum_abs, double half_ulp_of_output) {
  const double steps = static_cast<double>(k) / 16.0 + static_cast<double>(splits);
  return steps * 0x1p-22 * sum_abs + half_ulp_of_output;
}

double fp8_tensor_core_bound(int64_t k, int64_t splits, double sum_abs, double half_ulp_of_output) {
  const double steps = std::ceil(static_cast<double>(k) / 32.0);
  // no more can be cut off than there is
  const double cut_off = std::min(1.0, 34.0 * steps * 0x1p-13);
  return (cut_off + static_cast<double>(splits) * 0x1p-22) * sum_abs + half_ulp_of_output;
}

}  // namespace nvfp4_moe::internal
