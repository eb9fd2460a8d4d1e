// Weight matrices to NVFP4, block by block (docs/explanation/format.md).
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "core/block_bits.h"
#include "core/weight_quantizer.h"

namespace nvfp4_moe::internal {
namespace {

double squared_sum(const float* block) {
  double sum = 0;
  for (int i = 0; i < kBlockElems; ++i) sum += static_cast<double>(block[i]) * block[i];
  return sum;
}

Status check_weights(std::span<const float> x, int64_t rows, int64_t cols, float tensor_scale) {
  if (rows < 0 || cols < 0 || cols % kBlockElems != 0)
    return invalid_argument(
        "quantize_weights: expected rows >= 0 and cols a multiple of 16, got (" +
        std::to_string(rows) + ", " + std::to_string(cols) + ")");
  if (cols != 0 && static_cast<uint64_t>(rows) > x.size() / static_cast<uint64_t>(cols))
    return invalid_argument("quantize_weights: expected " + std::to_string(rows) + " x " +
                            std::to_string(cols) + " values, got " + std::to_string(x.size()));
  if (!(tensor_scale > 0) || !std::isfinite(tensor_scale))
    return invalid_argument("quantize_weights: expected a finite tensor scale > 0, got " +
                            std::to_string(tensor_scale));
  return {};
}

Status nonfinite_element(const float* row, int64_t r, int64_t cols) {
  int64_t c = 0;
  while (c < cols && std::isfinite(row[c])) ++c;
  return bad_input("row " + std::to_string(r) + " column " + std::to_string(c) +
                   ": expected a finite weight, got " + std::to_string(row[c]));
}

Status check_channel_weights(std::span<const float> weights, int64_t cols, ScaleSearch search) {
  if (weights.empty()) return {};
  if (search == ScaleSearch::kMax)
    return invalid_argument(
        "channel_weights: expected search mse or sweep, since max compares no errors, got max");
  if (weights.size() != static_cast<uint64_t>(cols))
    return invalid_argument("channel_weights: expected one for each of " + std::to_string(cols) +
                            " columns, got " + std::to_string(weights.size()));
  for (size_t c = 0; c < weights.size(); ++c) {
    if (!(weights[c] >= 0) || !std::isfinite(weights[c]))
      return invalid_argument("channel_weights: expected finite numbers of at least 0, got " +
                              std::to_string(weights[c]) + " for column " + std::to_string(c));
  }
  return {};
}

}  // namespace

float tensor_scale_from_amax(double amax) {
  const auto scale = static_cast<float>(amax / kNvfp4Range);
  return scale == 0.0f ? 1.0f : scale;
}

Status quantize_weights(std::span<const float> x, int64_t rows, int64_t cols, float tensor_scale,
                        ScaleSearch search, uint8_t* codes, uint8_t* block_scales,
                        QuantizeCounts& counts, double* sum_sq, double* sum_sq_error,
                        std::span<const float> channel_weights) {
  NVFP4_MOE_TRY(check_weights(x, rows, cols, tensor_scale));
  NVFP4_MOE_TRY(check_channel_weights(channel_weights, cols, search));
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
      const float* weights = channel_weights.empty() ? nullptr : channel_weights.data() + c;
      const uint8_t byte = quantizer.search_scale(search, block, amax, weights);
      uint8_t block_codes[kBlockElems] = {};
      if (byte != 0)
        counts.saturated_codes += static_cast<uint64_t>(quantizer.codes(block, byte, block_codes));
      counts.blocks += 1;
      counts.saturated_scales += quantizer.scale_saturates(amax);
      counts.zero_scales += byte == 0 && amax > 0;
      *block_scales++ = byte;
      pack_block(block_codes, codes);
      codes += kBlockElems / 2;
      if (sum_sq != nullptr) *sum_sq += squared_sum(block);
      if (sum_sq_error != nullptr)
        *sum_sq_error += quantizer.squared_error(block, byte, block_codes);
    }
  }
  return {};
}

}  // namespace nvfp4_moe::internal
