// Which scales a sweep tries. u = v s is a block's unit, A its largest magnitude.
//
// From above: halving u gives the grid {0, 1/4, 1/2, 3/4, 1, 3/2, 2, 3} u, which contains all of
// {0, 1/2, ..., 6} u up to 3 u. If A <= 3.5 u nothing rounds beyond 3 u, so u/2 is never worse. v/2
// is an E4M3 value from 2^-5 on. Below that, scales are multiples of 2^-9 and odd ones have no
// half. There a scale is left out only if A <= u/4 makes every code 0, since no scale does worse.
//
// From below: doubling u gives {0, 1, 2, 3, 4, 6, 8, 12} u, which lacks only 1/2 and 3/2. That
// costs each of the other 15 elements at most (u/2)^2, together 3.75 u^2, and gains the largest at
// least 4 u^2 if A >= 8 u. 2 v is an E4M3 value up to 224, so no scale that is at most 224 and at
// most A/(8 s) is best.
//
// With weights the second argument fails, since the largest element may have weight 0. But weights
// come from a sample, and an outlier in a channel that was quiet there must not be lost. So a scale
// that clips, A > 6 s up(v) with up(v) the next E4M3 value, may be taken only if the block's error
// without weights is at most E, that of the scale of kMax. Then (A - 6 u)^2 <= E, which bounds u
// from below. From above, u/2 must not clip either: A <= 3 u.
#include "core/weight_quantizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/block_bits.h"
#include "core/scale_screen.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int kTopScale = 126;        // 448
constexpr int kLeastHalved = 16;      // 2^-5: from here on, half a scale is also a scale
constexpr int kLeastUndoubled = 119;  // 240: from here on, twice a scale is not a scale

// The largest float theta such that, over floats a >= 0: a > theta iff a > t (inclusive: iff a >=
// t).
float threshold(double t, bool inclusive) {
  auto theta = static_cast<float>(t);
  if (static_cast<double>(theta) > t || (inclusive && static_cast<double>(theta) == t))
    theta = std::nextafter(theta, -std::numeric_limits<float>::infinity());
  return theta;
}

double scale_value(int byte) {
  return static_cast<double>(e4m3_to_float(static_cast<uint8_t>(byte)));
}

// The E4M3 values on both sides of a quotient, as bytes. Both are the same if it is on the grid or
// above 448.
struct Neighbours {
  int low, high;
};
Neighbours neighbours_of(double quotient) {
  const int nearest = e4m3_from_double(quotient);
  const double value = scale_value(nearest);
  return {value > quotient ? nearest - 1 : nearest,
          value < quotient ? std::min(nearest + 1, kTopScale) : nearest};
}

ScreenedBlock screened(const float* x, float amax, const float* weights) {
  ScreenedBlock block;
  const auto factor = static_cast<float>(6.0 / static_cast<double>(amax));
  for (size_t i = 0; i < kBlockElems; ++i) block.magnitudes[i] = std::fabs(x[i]) * factor;
  block.weight_sum = kBlockElems;
  if (weights == nullptr) return block;
  block.weighted = true;
  block.weight_sum = 0;
  const float most = *std::max_element(weights, weights + kBlockElems);
  for (size_t i = 0; i < kBlockElems; ++i) {
    block.weights[i] = most > 0 ? weights[i] / most : 0.0f;
    block.weight_sum += static_cast<double>(block.weights[i]);
  }
  return block;
}

using ScaleErrors = std::array<float, kTopScale + 1>;  // by scale byte

// Computes errors in float of the range's scales, each the multiple `unit` of its E4M3 value.
void screen(const ScreenedBlock& block, double unit, const ScaleRange& range, ScaleErrors& errors) {
  for (int begin = range.bottom; begin <= range.top; begin += kScreenLanes) {
    const int count = std::min(kScreenLanes, range.top + 1 - begin);
    ScreenLanes scales, found;
    for (int j = 0; j < kScreenLanes; ++j)
      scales[static_cast<size_t>(j)] =
          static_cast<float>(scale_value(begin + std::min(j, count - 1)) * unit);
    screen_errors(block, scales, count, found);
    for (int j = 0; j < count; ++j)
      errors[static_cast<size_t>(begin + j)] = found[static_cast<size_t>(j)];
  }
}

}  // namespace

// The best scale so far; among equals the first that was tried.
struct WeightQuantizer::Best {
  int byte;
  double error;
  void try_scale(int candidate, double its_error) {
    if (its_error < error) byte = candidate, error = its_error;
  }
};

WeightQuantizer::WeightQuantizer(float tensor_scale)
    : tensor_scale_(tensor_scale), six_s_(6.0 * tensor_scale) {
  constexpr std::array<double, 8> kBoundaries = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0};
  for (int byte = 1; byte <= kTopScale; ++byte) {
    const double unit = scale_value(byte) * static_cast<double>(tensor_scale);
    for (size_t i = 0; i < kBoundaries.size(); ++i)
      thresholds_[static_cast<size_t>(byte)][i] =
          threshold(kBoundaries[i] * unit, i == 1 || i == 3 || i == 5);
  }
}

uint8_t WeightQuantizer::scale(float amax) const { return e4m3_from_double(amax / six_s_); }
bool WeightQuantizer::scale_saturates(float amax) const {
  return amax / six_s_ > static_cast<double>(kE4m3Max);
}

int WeightQuantizer::codes(const float* x, uint8_t byte, uint8_t* out) const {
  const std::array<float, 8>& t = thresholds_[byte];
  int32_t magnitudes[kBlockElems];
  int saturated = 0;
  for (int i = 0; i < kBlockElems; ++i) {
    const float a = std::fabs(x[i]);
    magnitudes[i] =
        (a > t[0]) + (a > t[1]) + (a > t[2]) + (a > t[3]) + (a > t[4]) + (a > t[5]) + (a > t[6]);
    saturated += a > t[7];
  }
  for (int i = 0; i < kBlockElems; ++i)
    out[i] = static_cast<uint8_t>(static_cast<uint32_t>(magnitudes[i]) |
                                  (std::bit_cast<uint32_t>(x[i]) >> 28 & 8u));
  return saturated;
}

double WeightQuantizer::squared_error(const float* x, uint8_t byte, const uint8_t* block_codes,
                                      const float* weights) const {
  constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  const double unit = scale_value(byte) * static_cast<double>(tensor_scale_);
  double sum = 0;
  for (int i = 0; i < kBlockElems; ++i) {
    const double error = x[i] - kValues[block_codes[i]] * unit;
    sum += weights == nullptr ? error * error : error * error * static_cast<double>(weights[i]);
  }
  return sum;
}

double WeightQuantizer::error_under(const float* x, uint8_t byte, const float* weights) const {
  uint8_t block_codes[kBlockElems] = {};
  if (byte != 0) codes(x, byte, block_codes);
  return squared_error(x, byte, block_codes, weights);
}

uint8_t WeightQuantizer::search_scale(ScaleSearch search, const float* x, float amax,
                                      const float* weights) const {
  const uint8_t max_scale_byte = scale(amax);
  if (search == ScaleSearch::kMax || amax == 0) return max_scale_byte;
  return search == ScaleSearch::kMse ? best_neighbour(x, amax, weights, max_scale_byte)
                                     : best_of_sweep(x, amax, weights, max_scale_byte);
}

uint8_t WeightQuantizer::best_neighbour(const float* x, float amax, const float* weights,
                                        uint8_t max_scale_byte) const {
  Best best{max_scale_byte, error_under(x, max_scale_byte, weights)};
  for (const double quotient : {amax / six_s_, 1.5 * amax / six_s_}) {
    const Neighbours sides = neighbours_of(quotient);
    for (const int candidate : {sides.low, sides.high}) {
      if (candidate == max_scale_byte) continue;
      best.try_scale(candidate, error_under(x, static_cast<uint8_t>(candidate), weights));
    }
  }
  return static_cast<uint8_t>(best.byte);
}

ScaleRange WeightQuantizer::sweep_range(double amax) const {
  const double s = six_s_ / 6;  // exact: s has 24 bits
  ScaleRange range;
  range.bottom = std::clamp(neighbours_of(amax / (8 * s)).low, 1, kLeastUndoubled);
  range.top = neighbours_of(amax / (3.5 * s)).high;
  if (range.top < kLeastHalved)
    range.top = std::min(kLeastHalved - 1, neighbours_of(4 * amax / s).high);
  return range;
}

ScaleRange WeightQuantizer::weighted_range(double amax, double max_error) const {
  const double s = six_s_ / 6;
  ScaleRange range;
  // allowance for three roundings
  const double lowest = (amax - std::sqrt(max_error)) / six_s_ * (1 - 0x1p-40);
  range.bottom = lowest > 0 ? std::max(1, neighbours_of(lowest).low) : 1;
  range.top = neighbours_of(amax / (3 * s)).high;
  if (range.top < kLeastHalved)
    range.top = std::min(kLeastHalved - 1, neighbours_of(4 * amax / s).high);
  return range;
}

bool WeightQuantizer::clips(double amax, int byte) const {
  return amax > six_s_ * scale_value(std::min(byte + 1, kTopScale));
}

uint8_t WeightQuantizer::best_of_sweep(const float* x, float amax, const float* weights,
                                       uint8_t max_scale_byte) const {
  const auto reach = static_cast<double>(amax);
  const double max_error = weights == nullptr ? 0 : error_under(x, max_scale_byte, nullptr);
  const ScaleRange range =
      weights == nullptr ? sweep_range(reach) : weighted_range(reach, max_error);
  const double over_s = 6 * reach / six_s_;
  const bool screens = reach > 0x1p-100 && reach < 0x1p100 && over_s > 0x1p-12 && over_s < 0x1p40;
  ScaleErrors errors;  // only the range is set
  ScreenedBlock block;
  if (screens) {
    block = screened(x, amax, weights);
    screen(block, six_s_ / reach, range, errors);
  } else {
    errors.fill(0);  // out of float's range: all pass
  }
  const auto refused = [&](int byte) {
    return weights != nullptr && clips(reach, byte) &&
           error_under(x, static_cast<uint8_t>(byte), nullptr) > max_error;
  };
  constexpr float kRefused = std::numeric_limits<float>::infinity();
  while (true) {  // until all that pass may be taken: usually one round
    float least = kRefused;
    for (int byte = range.bottom; byte <= range.top; ++byte)
      least = std::min(least, errors[static_cast<size_t>(byte)]);
    if (least == kRefused) return max_scale_byte;
    // Allows for the limit's own rounding to float.
    const auto limit =
        screens
            ? static_cast<float>(screen_limit(block, static_cast<double>(least)) * (1 + 0x1p-20))
            : 0;
    int survivors = 0, survivor = 0;
    bool again = false;
    for (int byte = range.bottom; byte <= range.top; ++byte) {
      float& error = errors[static_cast<size_t>(byte)];
      if (error > limit) continue;
      if (refused(byte)) {
        error = kRefused;
        again = true;
        continue;
      }
      ++survivors;
      survivor = byte;
    }
    if (again) continue;
    // All others in the range, including the scale of kMax, are certainly worse than a single
    // survivor.
    if (survivors == 1 && max_scale_byte >= range.bottom && max_scale_byte <= range.top)
      return static_cast<uint8_t>(survivor);
    Best best{max_scale_byte, error_under(x, max_scale_byte, weights)};
    for (int byte = range.bottom; byte <= range.top; ++byte) {
      if (errors[static_cast<size_t>(byte)] <= limit && byte != max_scale_byte)
        best.try_scale(byte, error_under(x, static_cast<uint8_t>(byte), weights));
    }
    return static_cast<uint8_t>(best.byte);
  }
}

}  // namespace nvfp4_moe::internal
