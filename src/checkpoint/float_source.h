// Quantizes BF16, FP16 or FP32 expert weights to NVFP4 while loading a float checkpoint.
//
// The tensor scale is fl32(amax / 2688) of the whole matrix (gate and up have one each), even if a
// rank loads only a slice. So a slice has the same bytes as in the whole matrix, and
// tensor-parallel ranks add up. Block scales and codes are those of quantize_weights. Rows are
// converted to float a few at a time, so memory beyond the result stays small for any matrix.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/quantize.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// Element (r, c) is at data + r * row_stride + c * col_stride (bytes; any alignment). K runs along
// c.
struct FloatMatrix {
  const uint8_t* data = nullptr;
  DType dtype = DType::kBf16;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

// Converts rows [first, first + count) to floats, (count, cols) row-major.
void rows_to_float(const FloatMatrix& matrix, int64_t first, int64_t count, float* out);

// The tensor scale of the matrix. kBadInput, with the first coordinate, if an element is NaN or
// Inf.
Result<float> float_matrix_scale(const FloatMatrix& matrix);

// Quantizes the matrix under the given tensor scale: out_codes (rows, cols/2), out_scales (rows,
// cols/16).
Status quantize_float_matrix(const FloatMatrix& matrix, float tensor_scale, uint8_t* out_codes,
                             uint8_t* out_scales, QuantizeCounts& counts);

}  // namespace nvfp4_moe::internal
