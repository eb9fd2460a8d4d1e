// The quantizers of docs/format.md.
//
// Activations (exact and compat mode) follow the contract's float operations one by one. Weights are defined in double;
// two facts make that fast. (1) amax/(6s) and x/(vs) have quotients of a 24-bit by an at most 31-bit significand, which
// cannot come within double rounding of an E4M3 or E2M1 boundary without lying on it: so "in double, rounded once" is
// the exact rounding of the real quotient. (2) The boundaries t*v*s are exact in double, and for a float x both x > t
// and x >= t equal x > theta for one float theta. There are only 126 scales v, so a table of thetas per tensor leaves
// seven float comparisons per element and no division.
#include "core/quantize.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/float_formats.h"

namespace nvfp4_moe {
namespace {

constexpr uint32_t kInfBits = 0x7F800000u;
constexpr int kScaleBytes = 127;  // valid block scales 0x00..0x7E
constexpr float kSixth = std::bit_cast<float>(0x3E2AAAABu);

// |x| as ordered bits: finite < Inf < NaN.
uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu; }

uint32_t max_magnitude_bits(const float* x, int64_t count) {
  int32_t amax = 0;  // signed, since baseline x86-64 vectors compare only signed integers
  for (int64_t i = 0; i < count; ++i) amax = std::max(amax, static_cast<int32_t>(magnitude_bits(x[i])));
  return static_cast<uint32_t>(amax);
}

void pack_block(const uint8_t* codes16, uint8_t* packed) {
  for (int i = 0; i < kBlockElems / 2; ++i) packed[i] = pack_codes(codes16[2 * i], codes16[2 * i + 1]);
}

// True, with every output byte 0, where the row holds NaN or Inf.
bool refuse_nonfinite_row(std::span<const float> x, uint8_t* codes, uint8_t* block_scales, QuantizeCounts& counts) {
  if (max_magnitude_bits(x.data(), static_cast<int64_t>(x.size())) < kInfBits) return false;
  std::fill_n(codes, x.size() / 2, uint8_t{0});
  std::fill_n(block_scales, x.size() / kBlockElems, uint8_t{0});
  ++counts.nonfinite_rows;
  return true;
}

// One block of an activation row: `scale` is the float that becomes the block scale, quotient(x, v) what becomes a
// code.
template <class Quotient>
void quantize_activation_block(const float* x, float amax, float scale, const Quotient& quotient, uint8_t* codes,
                               uint8_t* block_scale, QuantizeCounts& counts) {
  const uint8_t byte = e4m3_from_float(scale);
  *block_scale = byte;
  counts.blocks += 1;
  counts.saturated_scales += scale > kE4m3Max;
  if (byte == 0) {
    counts.zero_scales += amax > 0;
    std::fill_n(codes, kBlockElems / 2, uint8_t{0});
    return;
  }
  uint8_t block_codes[kBlockElems];
  int saturated = 0;
  for (int i = 0; i < kBlockElems; ++i) {
    const float q = quotient(x[i]);
    const float a = std::fabs(q);
    const int magnitude =
        (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    block_codes[i] = static_cast<uint8_t>(magnitude | (std::bit_cast<uint32_t>(q) >> 28 & 8u));
    saturated += a > kE2m1Max;
  }
  counts.saturated_codes += static_cast<uint64_t>(saturated);
  pack_block(block_codes, codes);
}

// The largest float theta for which, over floats a >= 0: a > theta iff a > t (inclusive: iff a >= t).
float threshold(double t, bool inclusive) {
  auto theta = static_cast<float>(t);
  if (static_cast<double>(theta) > t || (inclusive && static_cast<double>(theta) == t))
    theta = std::nextafter(theta, -std::numeric_limits<float>::infinity());
  return theta;
}

class WeightQuantizer {
 public:
  explicit WeightQuantizer(float tensor_scale) : tensor_scale_(tensor_scale), six_s_(6.0 * tensor_scale) {
    constexpr std::array<double, 8> kBoundaries = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0};
    for (int byte = 1; byte < kScaleBytes; ++byte) {
      const double unit = e4m3_to_float(static_cast<uint8_t>(byte)) * static_cast<double>(tensor_scale);
      for (size_t i = 0; i < kBoundaries.size(); ++i)
        thresholds_[static_cast<size_t>(byte)][i] = threshold(kBoundaries[i] * unit, i == 1 || i == 3 || i == 5);
    }
  }

  uint8_t scale(float amax) const { return e4m3_from_double(amax / six_s_); }
  bool scale_saturates(float amax) const { return amax / six_s_ > static_cast<double>(kE4m3Max); }

  // Codes, one per byte, of a block under a scale that is not 0; returns how many quotients lie above 6.
  int codes(const float* x, uint8_t byte, uint8_t* out) const {
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

  double squared_error(const float* x, uint8_t byte, const uint8_t* block_codes) const {
    const double unit = e4m3_to_float(byte) * static_cast<double>(tensor_scale_);
    double sum = 0;
    for (int i = 0; i < kBlockElems; ++i) {
      const double error = x[i] - e2m1_to_float(block_codes[i]) * unit;
      sum += error * error;
    }
    return sum;
  }

  // kMse: the best of the E4M3 values just below and above amax/6 and amax/4, or the scale of kMax where none is
  // strictly better than it. A quotient on the grid has one neighbour, itself; one above 448 has 448.
  uint8_t search_scale(const float* x, float amax) const {
    const uint8_t max_scale_byte = scale(amax);
    uint8_t best = max_scale_byte;
    double best_error = error_under(x, max_scale_byte);
    for (const double quotient : {amax / six_s_, 1.5 * amax / six_s_}) {
      const int nearest = e4m3_from_double(quotient);
      const double value = e4m3_to_float(static_cast<uint8_t>(nearest));
      const int low = value > quotient ? nearest - 1 : nearest;
      const int high = value < quotient ? std::min(nearest + 1, kScaleBytes - 1) : nearest;
      for (const int candidate : {low, high}) {
        if (candidate == max_scale_byte) continue;
        const double error = error_under(x, static_cast<uint8_t>(candidate));
        if (error < best_error) {
          best = static_cast<uint8_t>(candidate);
          best_error = error;
        }
      }
    }
    return best;
  }

 private:
  double error_under(const float* x, uint8_t byte) const {
    uint8_t block_codes[kBlockElems] = {};
    if (byte != 0) codes(x, byte, block_codes);
    return squared_error(x, byte, block_codes);
  }

  float tensor_scale_;
  double six_s_;
  std::array<std::array<float, 8>, kScaleBytes> thresholds_{};  // by scale byte; row 0 unused
};

double squared_sum(const float* block) {
  double sum = 0;
  for (int i = 0; i < kBlockElems; ++i) sum += static_cast<double>(block[i]) * block[i];
  return sum;
}

Status check_weights(std::span<const float> x, int64_t rows, int64_t cols, float tensor_scale) {
  if (rows < 0 || cols < 0 || cols % kBlockElems != 0)
    return invalid_argument("quantize_weights: expected rows >= 0 and cols a multiple of 16, got (" +
                            std::to_string(rows) + ", " + std::to_string(cols) + ")");
  if (cols != 0 && static_cast<uint64_t>(rows) > x.size() / static_cast<uint64_t>(cols))
    return invalid_argument("quantize_weights: expected " + std::to_string(rows) + " x " + std::to_string(cols) +
                            " values, got " + std::to_string(x.size()));
  if (!(tensor_scale > 0) || !std::isfinite(tensor_scale))
    return invalid_argument("quantize_weights: expected a finite tensor scale > 0, got " +
                            std::to_string(tensor_scale));
  return {};
}

Status nonfinite_element(const float* row, int64_t r, int64_t cols) {
  int64_t c = 0;
  while (c < cols && std::isfinite(row[c])) ++c;
  return bad_input("row " + std::to_string(r) + " column " + std::to_string(c) + ": expected a finite weight, got " +
                   std::to_string(row[c]));
}

float token_scale(float amax, double range) {
  if (!std::isfinite(amax)) return std::numeric_limits<float>::quiet_NaN();
  return amax == 0.0f ? 1.0f : power_of_two_scale(static_cast<double>(amax), range);
}

}  // namespace

const char* to_string(ScaleSearch search) { return name_of(search); }
const char* to_string(QuantizeMode mode) { return name_of(mode); }

QuantizeCounts& QuantizeCounts::operator+=(const QuantizeCounts& other) {
  blocks += other.blocks;
  saturated_scales += other.saturated_scales;
  zero_scales += other.zero_scales;
  saturated_codes += other.saturated_codes;
  nonfinite_rows += other.nonfinite_rows;
  return *this;
}

float tensor_scale_from_amax(double amax) {
  const auto scale = static_cast<float>(amax / kNvfp4Range);
  return scale == 0.0f ? 1.0f : scale;
}

Status quantize_weights(std::span<const float> x, int64_t rows, int64_t cols, float tensor_scale, ScaleSearch search,
                        uint8_t* codes, uint8_t* block_scales, QuantizeCounts& counts, double* sum_sq,
                        double* sum_sq_error) {
  NVFP4_MOE_TRY(check_weights(x, rows, cols, tensor_scale));
  const WeightQuantizer quantizer(tensor_scale);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = x.data() + r * cols;
    if (max_magnitude_bits(row, cols) >= kInfBits) {
      ++counts.nonfinite_rows;
      return nonfinite_element(row, r, cols);
    }
    for (int64_t c = 0; c < cols; c += kBlockElems) {
      const float* block = row + c;
      const float amax = std::bit_cast<float>(max_magnitude_bits(block, kBlockElems));
      const bool searched = search == ScaleSearch::kMse && amax > 0;
      const uint8_t byte = searched ? quantizer.search_scale(block, amax) : quantizer.scale(amax);
      uint8_t block_codes[kBlockElems] = {};
      if (byte != 0) counts.saturated_codes += static_cast<uint64_t>(quantizer.codes(block, byte, block_codes));
      counts.blocks += 1;
      counts.saturated_scales += quantizer.scale_saturates(amax);
      counts.zero_scales += byte == 0 && amax > 0;
      *block_scales++ = byte;
      pack_block(block_codes, codes);
      codes += kBlockElems / 2;
      if (sum_sq != nullptr) *sum_sq += squared_sum(block);
      if (sum_sq_error != nullptr) *sum_sq_error += quantizer.squared_error(block, byte, block_codes);
    }
  }
  return {};
}

bool quantize_row_exact(std::span<const float> x, float power_of_two_scale, uint8_t* codes, uint8_t* block_scales,
                        QuantizeCounts& counts) {
  if (refuse_nonfinite_row(x, codes, block_scales, counts)) return false;
  const float inverse = 1.0f / power_of_two_scale;
  for (size_t c = 0; c < x.size(); c += kBlockElems) {
    const float* block = x.data() + c;
    const float amax = std::bit_cast<float>(max_magnitude_bits(block, kBlockElems));
    const float scale = (amax * inverse) * kSixth;
    const float v = e4m3_to_float(e4m3_from_float(scale));
    quantize_activation_block(
        block, amax, scale, [=](float value) { return (value * inverse) / v; }, codes + c / 2,
        block_scales + c / kBlockElems, counts);
  }
  return true;
}

float dynamic_token_scale(float amax) { return token_scale(amax, kNvfp4Range); }
float fp8_token_scale(float amax) { return token_scale(amax, double{kE4m3Max}); }

float row_amax(std::span<const float> x) {
  const uint32_t bits = max_magnitude_bits(x.data(), static_cast<int64_t>(x.size()));
  return bits > kInfBits ? std::numeric_limits<float>::quiet_NaN() : std::bit_cast<float>(bits);
}

bool quantize_row_compat(std::span<const float> x, float input_scale, uint8_t* codes, uint8_t* block_scales,
                         QuantizeCounts& counts) {
  if (refuse_nonfinite_row(x, codes, block_scales, counts)) return false;
  const float global = 1.0f / input_scale;
  const float inverse_global = 1.0f / global;
  for (size_t c = 0; c < x.size(); c += kBlockElems) {
    const float* block = x.data() + c;
    const float amax = std::bit_cast<float>(max_magnitude_bits(block, kBlockElems));
    const float scale = global * (amax * (1.0f / 6.0f));
    const float factor = 1.0f / (e4m3_to_float(e4m3_from_float(scale)) * inverse_global);
    quantize_activation_block(
        block, amax, scale, [=](float value) { return value * factor; }, codes + c / 2, block_scales + c / kBlockElems,
        counts);
  }
  return true;
}

bool quantize_row_int8_block(std::span<const float> x, int8_t* codes, float* block_scales, QuantizeCounts& counts) {
  if (max_magnitude_bits(x.data(), static_cast<int64_t>(x.size())) >= kInfBits) {
    std::fill_n(codes, x.size(), int8_t{0});
    std::fill_n(block_scales, x.size() / kBlockElems, std::numeric_limits<float>::quiet_NaN());
    ++counts.nonfinite_rows;
    return false;
  }
  for (size_t c = 0; c < x.size(); c += kBlockElems) {
    const float* block = x.data() + c;
    const float amax = std::bit_cast<float>(max_magnitude_bits(block, kBlockElems));
    const float scale = std::max(amax / 127.0f, kInt8BlockMinScale);
    int32_t any = 0;
    for (int i = 0; i < kBlockElems; ++i) {
      // Adding 1.5 2^23 leaves the quotient's nearest integer, ties to even, in the low bits of the sum.
      const int32_t code = std::bit_cast<int32_t>(block[i] / scale + 0x1.8p23f) - std::bit_cast<int32_t>(0x1.8p23f);
      any |= code;
      codes[c + static_cast<size_t>(i)] = static_cast<int8_t>(code);
    }
    block_scales[c / kBlockElems] = scale;
    counts.blocks += 1;
    counts.zero_scales += amax > 0 && any == 0;
  }
  return true;
}

float power_of_two_scale(double bound, double range) {
  int exponent = 0;
  (void)std::frexp(bound / range, &exponent);
  // The quotient is rounded, perhaps onto a power of two: the products below are exact, and say which side it lies on.
  while (exponent > -126 && std::ldexp(range, exponent - 1) >= bound) --exponent;
  while (exponent < 127 && std::ldexp(range, exponent) < bound) ++exponent;
  return static_cast<float>(std::ldexp(1.0, std::clamp(exponent, -126, 127)));
}

float power_of_two_row_scale(ActivationFormat format, float input_scale) {
  return power_of_two_scale(kNvfp4Range * static_cast<double>(input_scale), row_scale_range(format));
}

float round_up_to_power_of_two(float x) {
  int exponent = 0;
  const float mantissa = std::frexp(x, &exponent);
  return std::ldexp(1.0f, std::clamp(mantissa == 0.5f ? exponent - 1 : exponent, -126, 127));
}

bool is_power_of_two(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return (bits & 0x807FFFFFu) == 0 && bits != 0 && bits < kInfBits;
}

}  // namespace nvfp4_moe
