// The quantizers of docs/explanation/format.md.
//
// Activations (exact and vllm_order mode) follow the contract's float operations one by one.
// Weights are in quantize_weights.cpp.
#include "core/quantize.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>

#include "core/block_bits.h"
#include "core/float_formats.h"

namespace nvfp4_moe::internal {
namespace {

constexpr float kSixth = std::bit_cast<float>(0x3E2AAAABu);

// Returns true, and sets every output byte to 0, if the row holds NaN or Inf.
bool refuse_nonfinite_row(std::span<const float> x, uint8_t* codes, uint8_t* block_scales,
                          QuantizeCounts& counts) {
  if (max_magnitude_bits(x.data(), static_cast<int64_t>(x.size())) < kInfBits) return false;
  std::fill_n(codes, x.size() / 2, uint8_t{0});
  std::fill_n(block_scales, x.size() / kBlockElems, uint8_t{0});
  ++counts.nonfinite_rows;
  return true;
}

// Quantizes one block of an activation row: `scale` is the float that becomes the block scale, and
// quotient(x, v) becomes a code.
template <class Quotient>
void quantize_activation_block(const float* x, float amax, float scale, const Quotient& quotient,
                               uint8_t* codes, uint8_t* block_scale, QuantizeCounts& counts) {
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
    const int magnitude = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                          (a >= 3.5f) + (a > 5.0f);
    block_codes[i] = static_cast<uint8_t>(magnitude | (std::bit_cast<uint32_t>(q) >> 28 & 8u));
    saturated += a > kE2m1Max;
  }
  counts.saturated_codes += static_cast<uint64_t>(saturated);
  pack_block(block_codes, codes);
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

bool quantize_row_exact(std::span<const float> x, float power_of_two_scale, uint8_t* codes,
                        uint8_t* block_scales, QuantizeCounts& counts) {
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

bool quantize_row_vllm_order(std::span<const float> x, float input_scale, uint8_t* codes,
                             uint8_t* block_scales, QuantizeCounts& counts) {
  if (refuse_nonfinite_row(x, codes, block_scales, counts)) return false;
  const float global = 1.0f / input_scale;
  const float inverse_global = 1.0f / global;
  for (size_t c = 0; c < x.size(); c += kBlockElems) {
    const float* block = x.data() + c;
    const float amax = std::bit_cast<float>(max_magnitude_bits(block, kBlockElems));
    const float scale = global * (amax * (1.0f / 6.0f));
    const float factor = 1.0f / (e4m3_to_float(e4m3_from_float(scale)) * inverse_global);
    quantize_activation_block(
        block, amax, scale, [=](float value) { return value * factor; }, codes + c / 2,
        block_scales + c / kBlockElems, counts);
  }
  return true;
}

bool quantize_row_int8_block(std::span<const float> x, int8_t* codes, float* block_scales,
                             QuantizeCounts& counts) {
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
      // Adding 1.5 2^23 leaves the quotient's nearest integer, ties to even, in the low bits of the
      // sum.
      const int32_t code =
          std::bit_cast<int32_t>(block[i] / scale + 0x1.8p23f) - std::bit_cast<int32_t>(0x1.8p23f);
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
  // The quotient is rounded, perhaps onto a power of two. The products below are exact and decide
  // on which side it is.
  while (exponent > -126 && std::ldexp(range, exponent - 1) >= bound) --exponent;
  while (exponent < 127 && std::ldexp(range, exponent) < bound) ++exponent;
  return static_cast<float>(std::ldexp(1.0, std::clamp(exponent, -126, 127)));
}

Result<float> static_row_scale(ActivationFormat format, std::string_view name, float input_scale,
                               float factor) {
  const double range = row_scale_range(format);
  // exact
  const double bound = kNvfp4Range * static_cast<double>(input_scale) * static_cast<double>(factor);
  if (bound <= std::ldexp(range, 127)) return power_of_two_scale(bound, range);
  char got[80];
  std::snprintf(got, sizeof got, "%.9g times %.9g", static_cast<double>(input_scale),
                static_cast<double>(factor));
  return invalid_argument(std::string(name) + ": expected a row scale of at most 2^127, got " +
                          got);
}

bool is_power_of_two(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return (bits & 0x807FFFFFu) == 0 && bits != 0 && bits < kInfBits;
}

}  // namespace nvfp4_moe::internal
