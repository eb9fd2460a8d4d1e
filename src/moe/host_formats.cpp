// Inputs are converted row by row, so that a bf16 tensor never exists as floats as a whole.
#include "moe/host_formats.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/dequantize.h"
#include "core/float_formats.h"

namespace nvfp4_moe::internal::formats::host {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Rows of an activation dtype, converted to floats.
class Rows {
 public:
  Rows(const void* x, DType dtype, int64_t cols)
      : x_(x), dtype_(dtype), row_(static_cast<size_t>(cols)) {}
  const std::vector<float>& operator[](int64_t row) {
    const auto cols = static_cast<int64_t>(row_.size());
    if (cols > 0)
      to_floats(static_cast<const std::byte*>(x_) + row * cols * (bits(dtype_) / 8), dtype_, cols,
                row_.data());
    return row_;
  }

 private:
  const void* x_;
  DType dtype_;
  std::vector<float> row_;
};

float amax_of(const std::vector<float>& row) { return row.empty() ? 0.0f : row_amax(row); }

Status nonfinite_row(int64_t row) {
  return invalid_argument("x: expected finite values, row " + std::to_string(row) +
                          " holds NaN or Inf");
}

// Fills a row with NaN.
void fill_nan(DType dtype, void* row, int64_t cols) {
  if (dtype == DType::kF32) return void(std::fill_n(static_cast<float*>(row), cols, kNan));
  std::fill_n(static_cast<uint16_t*>(row), cols,
              dtype == DType::kBf16 ? uint16_t{0x7FC0} : uint16_t{0x7E00});
}

// Processes several rows at a time, since the quantizer builds a table in each call.
Status quantize_weight_rows(const Quantize& call, Rows& rows, QuantizeCounts& counts) {
  constexpr int64_t kRowsAtOnce = 64;
  float amax = 0;
  for (int64_t r = 0; r < call.rows; ++r) {
    const float of_row = amax_of(rows[r]);
    if (!std::isfinite(of_row)) return nonfinite_row(r);
    amax = std::max(amax, of_row);
  }
  const float scale = call.tensor_scale ? *call.tensor_scale : tensor_scale_from_amax(amax);
  const auto cols = static_cast<size_t>(call.cols);
  std::vector<float> x(static_cast<size_t>(std::min(kRowsAtOnce, call.rows)) * cols);
  std::span<const float> weights;
  if (call.channel_weights != nullptr) weights = {call.channel_weights, cols};
  for (int64_t first = 0; first < call.rows && cols > 0; first += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, call.rows - first);
    for (int64_t r = 0; r < count; ++r)
      std::copy_n(rows[first + r].data(), cols, x.data() + static_cast<size_t>(r) * cols);
    NVFP4_MOE_TRY(quantize_weights({x.data(), static_cast<size_t>(count) * cols}, count, call.cols,
                                   scale, call.search, call.codes + first * (call.cols / 2),
                                   call.block_scales + first * (call.cols / kBlockElems), counts,
                                   nullptr, nullptr, weights));
  }
  *call.scales = scale;
  return {};
}

}  // namespace

Status quantize(const Quantize& call, QuantizeCounts& counts) {
  Rows rows(call.x, call.dtype, call.cols);
  if (call.mode == QuantizeMode::kWeights) return quantize_weight_rows(call, rows, counts);
  const float scale = call.tensor_scale.value_or(0.0f);
  for (int64_t r = 0; r < call.rows; ++r) {
    const std::vector<float>& row = rows[r];
    uint8_t* const codes = call.codes + r * (call.cols / 2);
    uint8_t* const block_scales = call.block_scales + r * (call.cols / kBlockElems);
    bool finite = true;
    switch (call.mode) {
      case QuantizeMode::kWeights: break;
      case QuantizeMode::kDynamicToken: {
        const float amax = amax_of(row);
        const float row_scale = std::isfinite(amax) ? dynamic_token_scale(amax) : 1.0f;
        // Codes and block scales cannot express NaN; the row's scale can.
        call.scales[r] =
            quantize_row_exact(row, row_scale, codes, block_scales, counts) ? row_scale : kNan;
        break;
      }
      case QuantizeMode::kStatic:
        finite = quantize_row_exact(row, scale, codes, block_scales, counts);
        break;
      case QuantizeMode::kVllmOrder:
        finite = quantize_row_vllm_order(row, scale, codes, block_scales, counts);
        break;
    }
    if (!finite && call.nonfinite_rows == NonfiniteRows::kRefused) return nonfinite_row(r);
  }
  if (call.mode != QuantizeMode::kDynamicToken) *call.scales = scale;
  return {};
}

Status quantize_int8_block(const QuantizeInt8Block& call, QuantizeCounts& counts) {
  Rows rows(call.x, call.dtype, call.cols);
  for (int64_t r = 0; r < call.rows; ++r)
    quantize_row_int8_block(rows[r], call.codes + r * call.cols,
                            call.block_scales + r * (call.cols / kBlockElems), counts);
  return {};
}

Status dequantize(const Dequantize& call) {
  if (!call.scale_of_row) {
    const float scale = call.scales == nullptr ? call.tensor_scale : *call.scales;
    return nvfp4_moe::internal::dequantize(
        Nvfp4View::contiguous(call.codes, call.block_scales, scale, call.rows, call.cols),
        call.out_dtype, call.out);
  }
  const int64_t row_bytes = call.cols * (bits(call.out_dtype) / 8);
  for (int64_t r = 0; r < call.rows; ++r) {
    std::byte* const row = static_cast<std::byte*>(call.out) + r * row_bytes;
    if (std::isnan(call.scales[r])) {  // how quantize encodes a row that contained NaN or Inf
      fill_nan(call.out_dtype, row, call.cols);
      continue;
    }
    const Nvfp4View view = Nvfp4View::contiguous(call.codes + r * (call.cols / 2),
                                                 call.block_scales + r * (call.cols / kBlockElems),
                                                 call.scales[r], 1, call.cols);
    if (const Status status = nvfp4_moe::internal::dequantize(view, call.out_dtype, row);
        !status.ok())
      return status.in("row " + std::to_string(r));
  }
  return {};
}

}  // namespace nvfp4_moe::internal::formats::host
