// Which scales a sweep looks at. u = v s is a block's unit, A its largest magnitude among the weighted elements.
//
// From above: halving u gives the grid {0, 1/4, 1/2, 3/4, 1, 3/2, 2, 3} u, which holds all of {0, 1/2, ..., 6} u up to
// 3 u. Where A <= 3.5 u nothing rounds beyond 3 u, so that u/2 is nowhere worse. v/2 is an E4M3 value from 2^-5 on;
// below, where scales are multiples of 2^-9, odd ones have no half, and a scale is left out only where A <= u/4 makes
// every code 0, as no scale does worse.
// From below: doubling u gives {0, 1, 2, 3, 4, 6, 8, 12} u, which lacks 1/2 and 3/2 alone. That costs each of the other
// 15 elements at most (u/2)^2, together 3.75 u^2, and gains the largest at least 4 u^2 where A >= 8 u. 2 v is an E4M3
// value up to 224, so nothing at most 224 and at most A/(8 s) is best.
// With weights the second argument fails: the largest element may weigh nothing. There the sweep goes down until what
// saturation alone costs is above the best error found, which only grows from there.
#include "core/weight_quantizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/block_bits.h"
#include "core/scale_screen.h"

namespace nvfp4_moe {
namespace {

constexpr int kTopScale = 126;      // 448
constexpr int kLeastHalved = 16;    // 2^-5: from here on half a scale is one too
constexpr int kLeastUndoubled = 119;  // 240: from here on twice a scale is none

// The largest float theta for which, over floats a >= 0: a > theta iff a > t (inclusive: iff a >= t).
float threshold(double t, bool inclusive) {
  auto theta = static_cast<float>(t);
  if (static_cast<double>(theta) > t || (inclusive && static_cast<double>(theta) == t))
    theta = std::nextafter(theta, -std::numeric_limits<float>::infinity());
  return theta;
}

double scale_value(int byte) { return static_cast<double>(e4m3_to_float(static_cast<uint8_t>(byte))); }

// The E4M3 values on both sides of a quotient, as bytes; the same twice for one on the grid or above 448.
struct Neighbours {
  int low, high;
};
Neighbours neighbours_of(double quotient) {
  const int nearest = e4m3_from_double(quotient);
  const double value = scale_value(nearest);
  return {value > quotient ? nearest - 1 : nearest, value < quotient ? std::min(nearest + 1, kTopScale) : nearest};
}

// max |x| over the elements that have a weight.
double weighted_amax(const float* x, const float* weights) {
  float amax = 0;
  for (int i = 0; i < kBlockElems; ++i) amax = std::max(amax, weights[i] > 0 ? std::fabs(x[i]) : 0.0f);
  return static_cast<double>(amax);
}

ScreenedBlock screened(const float* x, double reach, const float* weights) {
  ScreenedBlock block;
  const auto factor = static_cast<float>(6.0 / reach);
  for (size_t i = 0; i < kBlockElems; ++i) block.magnitudes[i] = std::fabs(x[i]) * factor;
  block.weight_sum = kBlockElems;
  if (weights == nullptr) return block;
  block.weighted = true;
  block.weight_sum = 0;
  const float most = *std::max_element(weights, weights + kBlockElems);
  for (size_t i = 0; i < kBlockElems; ++i) {
    block.weights[i] = weights[i] / most;
    if (block.weights[i] == 0) block.magnitudes[i] = 0;  // it may be beyond 6
    block.magnitudes[i] = std::min(block.magnitudes[i], 6.0f);
    block.weight_sum += static_cast<double>(block.weights[i]);
  }
  return block;
}

// Errors in float of the range's scales, from the top down, each the multiple `unit` of its E4M3 value; with weights the
// range ends where saturation alone costs too much. Returns what no best scale's error lies above.
float screen(const ScreenedBlock& block, double unit, ScaleRange& range, std::array<float, kTopScale + 1>& errors) {
  float least = std::numeric_limits<float>::infinity();
  double limit = 0;
  int begin = range.top + 1;
  while (begin > range.bottom) {
    const int count = std::min(kScreenLanes, begin - range.bottom);
    begin -= count;
    ScreenLanes scales, found;
    for (int j = 0; j < kScreenLanes; ++j)
      scales[static_cast<size_t>(j)] = static_cast<float>(scale_value(begin + std::min(j, count - 1)) * unit);
    screen_errors(block, scales, count, found);
    for (int j = 0; j < count; ++j) {
      errors[static_cast<size_t>(begin + j)] = found[static_cast<size_t>(j)];
      least = std::min(least, found[static_cast<size_t>(j)]);
    }
    limit = screen_limit(block, static_cast<double>(least)) * (1 + 0x1p-20);  // room for its own rounding to float
    if (block.weighted && saturation_error(block, scale_value(begin) * unit) > limit) break;
  }
  range.bottom = begin;
  return static_cast<float>(limit);
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

WeightQuantizer::WeightQuantizer(float tensor_scale) : tensor_scale_(tensor_scale), six_s_(6.0 * tensor_scale) {
  constexpr std::array<double, 8> kBoundaries = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0};
  for (int byte = 1; byte <= kTopScale; ++byte) {
    const double unit = scale_value(byte) * static_cast<double>(tensor_scale);
    for (size_t i = 0; i < kBoundaries.size(); ++i)
      thresholds_[static_cast<size_t>(byte)][i] = threshold(kBoundaries[i] * unit, i == 1 || i == 3 || i == 5);
  }
}

uint8_t WeightQuantizer::scale(float amax) const { return e4m3_from_double(amax / six_s_); }
bool WeightQuantizer::scale_saturates(float amax) const { return amax / six_s_ > static_cast<double>(kE4m3Max); }

int WeightQuantizer::codes(const float* x, uint8_t byte, uint8_t* out) const {
  const std::array<float, 8>& t = thresholds_[byte];
  int32_t magnitudes[kBlockElems];
  int saturated = 0;
  for (int i = 0; i < kBlockElems; ++i) {
    const float a = std::fabs(x[i]);
    magnitudes[i] = (a > t[0]) + (a > t[1]) + (a > t[2]) + (a > t[3]) + (a > t[4]) + (a > t[5]) + (a > t[6]);
    saturated += a > t[7];
  }
  for (int i = 0; i < kBlockElems; ++i)
    out[i] = static_cast<uint8_t>(static_cast<uint32_t>(magnitudes[i]) | (std::bit_cast<uint32_t>(x[i]) >> 28 & 8u));
  return saturated;
}

double WeightQuantizer::squared_error(const float* x, uint8_t byte, const uint8_t* block_codes,
                                      const float* weights) const {
  const double unit = scale_value(byte) * static_cast<double>(tensor_scale_);
  double sum = 0;
  for (int i = 0; i < kBlockElems; ++i) {
    const double error = x[i] - e2m1_to_float(block_codes[i]) * unit;
    sum += weights == nullptr ? error * error : error * error * static_cast<double>(weights[i]);
  }
  return sum;
}

double WeightQuantizer::error_under(const float* x, uint8_t byte, const float* weights) const {
  uint8_t block_codes[kBlockElems] = {};
  if (byte != 0) codes(x, byte, block_codes);
  return squared_error(x, byte, block_codes, weights);
}

uint8_t WeightQuantizer::search_scale(ScaleSearch search, const float* x, float amax, const float* weights) const {
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

ScaleRange WeightQuantizer::sweep_range(double reach, bool weighted) const {
  const double s = six_s_ / 6;  // exact: s has 24 bits
  ScaleRange range;
  range.top = neighbours_of(reach / (3.5 * s)).high;
  if (range.top < kLeastHalved) range.top = std::min(kLeastHalved - 1, neighbours_of(4 * reach / s).high);
  if (!weighted) range.bottom = std::clamp(neighbours_of(reach / (8 * s)).low, 1, kLeastUndoubled);
  return range;
}

uint8_t WeightQuantizer::best_of_sweep(const float* x, float amax, const float* weights, uint8_t max_scale_byte) const {
  const double reach = weights == nullptr ? static_cast<double>(amax) : weighted_amax(x, weights);
  if (reach == 0) return max_scale_byte;  // only elements without weight are not 0
  ScaleRange range = sweep_range(reach, weights != nullptr);
  std::array<float, kTopScale + 1> errors{};
  float limit = 0;  // of errors: where nothing is screened, all pass
  const double over_s = 6 * reach / six_s_;
  if (reach > 0x1p-100 && reach < 0x1p100 && over_s > 0x1p-12 && over_s < 0x1p40)
    limit = screen(screened(x, reach, weights), six_s_ / reach, range, errors);
  int survivors = 0, survivor = 0;
  for (int byte = range.bottom; byte <= range.top; ++byte) {
    if (errors[static_cast<size_t>(byte)] > limit) continue;
    ++survivors;
    survivor = byte;
  }
  // All others that were screened, the scale of kMax among them, are certainly worse than a single survivor.
  if (survivors == 1 && max_scale_byte >= range.bottom && max_scale_byte <= range.top)
    return static_cast<uint8_t>(survivor);
  Best best{max_scale_byte, error_under(x, max_scale_byte, weights)};
  for (int byte = range.bottom; byte <= range.top; ++byte) {
    if (errors[static_cast<size_t>(byte)] <= limit && byte != max_scale_byte)
      best.try_scale(byte, error_under(x, static_cast<uint8_t>(byte), weights));
  }
  return static_cast<uint8_t>(best.byte);
}

}  // namespace nvfp4_moe
