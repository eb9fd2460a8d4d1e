#include "checkpoint/float_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/float_formats.h"

namespace nvfp4_moe::internal {
namespace {

template <class T>
T load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

template <class ToFloat>
void convert_rows(const FloatMatrix& matrix, int64_t first, int64_t count, float* out,
                  ToFloat value_at) {
  for (int64_t r = 0; r < count; ++r) {
    const uint8_t* row = matrix.data + (first + r) * matrix.row_stride;
    for (int64_t c = 0; c < matrix.cols; ++c)
      out[r * matrix.cols + c] = value_at(row + c * matrix.col_stride);
  }
}

}  // namespace

void rows_to_float(const FloatMatrix& matrix, int64_t first, int64_t count, float* out) {
  switch (matrix.dtype) {
    case DType::kBf16:
      convert_rows(matrix, first, count, out,
                   [](const uint8_t* at) { return bf16_to_float(load<uint16_t>(at)); });
      break;
    case DType::kF16:
      convert_rows(matrix, first, count, out,
                   [](const uint8_t* at) { return fp16_to_float(load<uint16_t>(at)); });
      break;
    default:
      convert_rows(matrix, first, count, out, [](const uint8_t* at) { return load<float>(at); });
      break;
  }
}

namespace {

// About 1 MiB of floats at a time.
int64_t rows_at_a_time(const FloatMatrix& matrix) {
  return std::clamp<int64_t>((int64_t{1} << 18) / std::max<int64_t>(matrix.cols, 1), 1,
                             matrix.rows);
}

}  // namespace

Result<float> float_matrix_scale(const FloatMatrix& matrix) {
  const int64_t chunk = rows_at_a_time(matrix);
  std::vector<float> rows(static_cast<size_t>(chunk * matrix.cols));  // (chunk, cols)
  float amax = 0;
  for (int64_t r = 0; r < matrix.rows; r += chunk) {
    const int64_t count = std::min(chunk, matrix.rows - r);
    rows_to_float(matrix, r, count, rows.data());
    const float here = row_amax({rows.data(), static_cast<size_t>(count * matrix.cols)});
    if (!std::isfinite(here)) {
      for (int64_t i = 0; i < count * matrix.cols; ++i) {
        if (std::isfinite(rows[static_cast<size_t>(i)])) continue;
        return bad_input(fmt::format("({}, {}): expected a finite weight, got {}",
                                     r + i / matrix.cols, i % matrix.cols,
                                     rows[static_cast<size_t>(i)]));
      }
    }
    amax = std::max(amax, here);
  }
  return tensor_scale_from_amax(static_cast<double>(amax));
}

Status quantize_float_matrix(const FloatMatrix& matrix, float tensor_scale, uint8_t* out_codes,
                             uint8_t* out_scales, QuantizeCounts& counts) {
  const int64_t chunk = rows_at_a_time(matrix);
  std::vector<float> rows(static_cast<size_t>(chunk * matrix.cols));  // (chunk, cols)
  for (int64_t r = 0; r < matrix.rows; r += chunk) {
    const int64_t count = std::min(chunk, matrix.rows - r);
    rows_to_float(matrix, r, count, rows.data());
    NVFP4_MOE_TRY(quantize_weights({rows.data(), static_cast<size_t>(count * matrix.cols)}, count,
                                   matrix.cols, tensor_scale, ScaleSearch::kMax,
                                   out_codes + r * (matrix.cols / 2),
                                   out_scales + r * (matrix.cols / 16), counts));
  }
  return {};
}

}  // namespace nvfp4_moe::internal
