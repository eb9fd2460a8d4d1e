// The C interface: the format by itself, host arrays to host arrays. Every size is checked before anything is written.
#include "c_api/format.h"

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/activation.h"
#include "core/dequantize.h"
#include "core/float_formats.h"
#include "core/quantize.h"
#include "core/scale_layout.h"
#include "moe/batch_check.h"

using nvfp4_moe::invalid_argument;
using nvfp4_moe::Status;
namespace api = nvfp4_moe::c_api;
namespace moe = nvfp4_moe;

namespace {

// A matrix of activations, read row by row as floats.
struct Rows {
  const void* x;
  moe::DType dtype;
  int64_t rows, cols;
  std::vector<float> line;  // (cols)

  static moe::Result<Rows> make(const void* x, nvfp4_moe_dtype dtype, int64_t rows, int64_t cols) {
    NVFP4_MOE_TRY(api::check_matrix_size(rows, cols));
    NVFP4_MOE_ASSIGN(const moe::DType type, api::read_dtype("dtype", dtype, moe::DType::kBf16));
    NVFP4_MOE_TRY(moe::check_activation_dtype("x", type));
    if (rows > 0 && cols > 0) NVFP4_MOE_TRY(moe::check_array({"x", x, type, rows * cols}));
    return Rows{x, type, rows, cols, std::vector<float>(static_cast<size_t>(cols))};
  }
  const std::vector<float>& row(int64_t r) {
    const auto* bytes = static_cast<const std::byte*>(x) + r * cols * (bits(dtype) / 8);
    moe::to_floats(bytes, dtype, cols, line.data());
    return line;
  }
};

// A caller's struct_size is looked at before work is done and arrays are written.
Status check_counts(const nvfp4_moe_quantize_counts* counts) {
  if (counts == nullptr) return {};
  return api::check_struct_size("counts", counts->struct_size, sizeof(nvfp4_moe_quantize_counts));
}

Status write_counts(const moe::QuantizeCounts& counts, nvfp4_moe_quantize_counts* out) {
  if (out == nullptr) return {};
  const nvfp4_moe_quantize_counts c{sizeof(c),          counts.blocks,          counts.saturated_scales,
                                    counts.zero_scales, counts.saturated_codes, counts.nonfinite_rows};
  return api::write_struct("counts", c, out);
}

// Quantizes row by row: one(row, codes, block_scales, r, counts). A row has cols codes, two to a byte in NVFP4.
template <class Code, class Scale, class One>
Status quantize_rows(const void* x, nvfp4_moe_dtype dtype, int64_t rows, int64_t cols, Code* codes, Scale* block_scales,
                     nvfp4_moe_quantize_counts* out, One&& one) {
  const int64_t row_codes = std::is_same_v<Code, uint8_t> ? cols / 2 : cols;
  NVFP4_MOE_TRY(check_counts(out));
  NVFP4_MOE_ASSIGN(Rows input, Rows::make(x, dtype, rows, cols));
  NVFP4_MOE_TRY(api::check_outputs(rows, cols, codes, block_scales));
  moe::QuantizeCounts counts;
  for (int64_t r = 0; r < rows; ++r)
    one(input.row(r), codes + r * row_codes, block_scales + r * (cols / 16), r, counts);
  return write_counts(counts, out);
}

moe::Result<moe::Nvfp4View> read_view(const uint8_t* codes, const uint8_t* block_scales, float tensor_scale,
                                      int64_t rows, int64_t cols) {
  NVFP4_MOE_TRY(api::check_matrix_size(rows, cols));
  NVFP4_MOE_TRY(api::check_outputs(rows, cols, codes, block_scales));
  return moe::Nvfp4View::contiguous(codes, block_scales, tensor_scale, rows, cols);
}

bool is_fp8_block(int64_t block_rows, int64_t block_cols) {
  return (block_rows == 0 && block_cols == 0) ||
         (block_rows > 0 && block_rows <= api::kMaxSide && block_cols > 0 && block_cols <= api::kMaxSide);
}

}  // namespace

extern "C" {

nvfp4_moe_code nvfp4_moe_quantize(const void* x, nvfp4_moe_dtype dtype, int64_t rows, int64_t cols, int32_t search,
                                  float* tensor_scale, uint8_t* codes, uint8_t* block_scales,
                                  nvfp4_moe_quantize_counts* counts) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(check_counts(counts));
    NVFP4_MOE_ASSIGN(Rows input, Rows::make(x, dtype, rows, cols));
    NVFP4_MOE_ASSIGN(const moe::ScaleSearch how, api::read_enum("search", search, moe::ScaleSearch::kMse));
    NVFP4_MOE_TRY(api::check_pointer("tensor_scale", tensor_scale));
    NVFP4_MOE_TRY(api::check_outputs(rows, cols, codes, block_scales));
    float amax = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const float row_amax = cols > 0 ? moe::row_amax(input.row(r)) : 0.0f;
      if (!std::isfinite(row_amax))
        return invalid_argument("x: expected finite weights, got NaN or Inf in row " + std::to_string(r));
      amax = std::max(amax, row_amax);
    }
    const float scale = *tensor_scale == 0.0f ? moe::tensor_scale_from_amax(amax) : *tensor_scale;
    if (!std::isfinite(scale) || scale <= 0)
      return invalid_argument("tensor_scale: expected a positive number, or 0 for x's own, got " +
                              std::to_string(scale));
    moe::QuantizeCounts total;
    for (int64_t r = 0; r < rows && cols > 0; ++r)
      NVFP4_MOE_TRY(moe::quantize_weights(input.row(r), 1, cols, scale, how, codes + r * (cols / 2),
                                          block_scales + r * (cols / 16), total));
    *tensor_scale = scale;
    return write_counts(total, counts);
  });
}

nvfp4_moe_code nvfp4_moe_quantize_dynamic_token(const void* x, nvfp4_moe_dtype dtype, int64_t rows, int64_t cols,
                                                uint8_t* codes, uint8_t* block_scales, float* row_scales,
                                                nvfp4_moe_quantize_counts* counts) {
  return api::guarded([&]() -> Status {
    if (rows > 0) NVFP4_MOE_TRY(api::check_pointer("row_scales", row_scales));
    return quantize_rows(x, dtype, rows, cols, codes, block_scales, counts,
                         [&](const std::vector<float>& row, uint8_t* row_codes, uint8_t* row_block_scales, int64_t r,
                             moe::QuantizeCounts& total) {
                           const float amax = row.empty() ? 0.0f : moe::row_amax(row);
                           const bool finite = std::isfinite(amax);
                           const float scale = finite ? moe::dynamic_token_scale(amax) : 1.0f;
                           moe::quantize_row_exact(row, scale, row_codes, row_block_scales, total);
                           row_scales[r] = finite ? scale : std::numeric_limits<float>::quiet_NaN();
                         });
  });
}

nvfp4_moe_code nvfp4_moe_quantize_given(const void* x, nvfp4_moe_dtype dtype, int64_t rows, int64_t cols,
                                        float power_of_two, uint8_t* codes, uint8_t* block_scales,
                                        nvfp4_moe_quantize_counts* counts) {
  return api::guarded([&]() -> Status {
    if (!moe::is_power_of_two(power_of_two))
      return invalid_argument("power_of_two: expected a normal power of two, got " + std::to_string(power_of_two));
    return quantize_rows(x, dtype, rows, cols, codes, block_scales, counts,
                         [&](const std::vector<float>& row, uint8_t* row_codes, uint8_t* row_block_scales, int64_t,
                             moe::QuantizeCounts& total) {
                           moe::quantize_row_exact(row, power_of_two, row_codes, row_block_scales, total);
                         });
  });
}

nvfp4_moe_code nvfp4_moe_quantize_compat(const void* x, nvfp4_moe_dtype dtype, int64_t rows, int64_t cols,
                                         float input_scale, uint8_t* codes, uint8_t* block_scales,
                                         nvfp4_moe_quantize_counts* counts) {
  return api::guarded([&]() -> Status {
    if (!std::isnormal(input_scale) || input_scale <= 0)
      return invalid_argument("input_scale: expected a positive normal number, got " + std::to_string(input_scale));
    return quantize_rows(x, dtype, rows, cols, codes, block_scales, counts,
                         [&](const std::vector<float>& row, uint8_t* row_codes, uint8_t* row_block_scales, int64_t,
                             moe::QuantizeCounts& total) {
                           moe::quantize_row_compat(row, input_scale, row_codes, row_block_scales, total);
                         });
  });
}

nvfp4_moe_code nvfp4_moe_swiglu_quantize(const nvfp4_moe_swiglu* options, const void* gate_up, int64_t rows,
                                         int64_t inner, const float* row_weights, uint8_t* codes, uint8_t* block_scales,
                                         float* row_scales, nvfp4_moe_quantize_counts* counts) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(check_counts(counts));
    NVFP4_MOE_ASSIGN(const api::Swiglu swiglu, api::Swiglu::read(options, rows, inner));
    moe::QuantizeCounts total;
    if (rows > 0 && inner > 0) {
      NVFP4_MOE_TRY(moe::check_array({"gate_up", gate_up, swiglu.dtype, rows * inner * 2}));
      if (row_weights != nullptr) NVFP4_MOE_TRY(moe::check_array({"row_weights", row_weights, moe::DType::kF32, rows}));
      NVFP4_MOE_TRY(api::check_outputs(rows, inner, codes, block_scales));
      NVFP4_MOE_TRY(moe::check_array({"row_scales", row_scales, moe::DType::kF32, rows}));
      moe::swiglu_quantize(swiglu.activation, {gate_up, swiglu.dtype, rows, inner, swiglu.interleaved}, row_weights,
                           swiglu.power_of_two, {codes, block_scales, row_scales}, total);
    }
    return write_counts(total, counts);
  });
}

nvfp4_moe_code nvfp4_moe_quantize_int8_block(const void* x, nvfp4_moe_dtype dtype, int64_t rows, int64_t cols,
                                             int8_t* codes, float* block_scales, nvfp4_moe_quantize_counts* counts) {
  return api::guarded([&]() -> Status {
    return quantize_rows(
        x, dtype, rows, cols, codes, block_scales, counts,
        [&](const std::vector<float>& row, int8_t* row_codes, float* row_block_scales, int64_t,
            moe::QuantizeCounts& total) { moe::quantize_row_int8_block(row, row_codes, row_block_scales, total); });
  });
}

nvfp4_moe_code nvfp4_moe_dequantize(const uint8_t* codes, const uint8_t* block_scales, float tensor_scale, int64_t rows,
                                    int64_t cols, nvfp4_moe_dtype out_dtype, void* out) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const moe::Nvfp4View view, read_view(codes, block_scales, tensor_scale, rows, cols));
    NVFP4_MOE_ASSIGN(const moe::DType dtype, api::read_dtype("out_dtype", out_dtype, moe::DType::kBf16));
    NVFP4_MOE_TRY(moe::check_activation_dtype("out", dtype));
    if (rows == 0 || cols == 0) return {};
    NVFP4_MOE_TRY(moe::check_array({"out", out, dtype, rows * cols}));
    return moe::dequantize(view, dtype, out);
  });
}

nvfp4_moe_code nvfp4_moe_convert_to_fp8(const uint8_t* codes, const uint8_t* block_scales, float tensor_scale,
                                        int64_t rows, int64_t cols, int64_t block_rows, int64_t block_cols,
                                        uint8_t* out, float* scales) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const moe::Nvfp4View view, read_view(codes, block_scales, tensor_scale, rows, cols));
    if (!is_fp8_block(block_rows, block_cols))
      return invalid_argument("(block_rows, block_cols): expected both 0, or 1 to 2^30 each, got (" +
                              std::to_string(block_rows) + ", " + std::to_string(block_cols) + ")");
    if (rows == 0 || cols == 0) return {};
    NVFP4_MOE_TRY(api::check_pointer("out", out));
    NVFP4_MOE_TRY(moe::check_array({"scales", scales, moe::DType::kF32, 1}));
    return moe::convert_to_fp8(view, {block_rows, block_cols}, out, scales);
  });
}

int64_t nvfp4_moe_fp8_scale_count(int64_t rows, int64_t cols, int64_t block_rows, int64_t block_cols) {
  if (rows < 0 || rows > api::kMaxSide || cols < 0 || cols > api::kMaxSide || !is_fp8_block(block_rows, block_cols))
    return -1;
  moe::Nvfp4View view;
  view.rows = rows;
  view.cols = cols;
  return moe::fp8_scale_count(view, {block_rows, block_cols});
}

nvfp4_moe_code nvfp4_moe_pack_codes(const uint8_t* values, int64_t count, uint8_t* packed) {
  return api::guarded([&]() -> Status {
    if (count < 0 || count % 2 != 0)
      return invalid_argument("count: expected an even number of codes, got " + std::to_string(count));
    if (count == 0) return {};
    NVFP4_MOE_TRY(api::check_pointer("values", values));
    NVFP4_MOE_TRY(api::check_pointer("packed", packed));
    for (int64_t i = 0; i < count; ++i) {
      if (values[i] > 15)
        return invalid_argument("values: expected codes below 16, got " + std::to_string(values[i]) + " at " +
                                std::to_string(i));
    }
    for (int64_t i = 0; i < count / 2; ++i) packed[i] = moe::pack_codes(values[2 * i], values[2 * i + 1]);
    return {};
  });
}

nvfp4_moe_code nvfp4_moe_unpack_codes(const uint8_t* packed, int64_t count, uint8_t* values) {
  return api::guarded([&]() -> Status {
    if (count < 0 || count % 2 != 0)
      return invalid_argument("count: expected an even number of codes, got " + std::to_string(count));
    if (count == 0) return {};
    NVFP4_MOE_TRY(api::check_pointer("packed", packed));
    NVFP4_MOE_TRY(api::check_pointer("values", values));
    for (int64_t i = 0; i < count / 2; ++i) {
      values[2 * i] = moe::low_code(packed[i]);
      values[2 * i + 1] = moe::high_code(packed[i]);
    }
    return {};
  });
}

int64_t nvfp4_moe_swizzled_bytes(int64_t rows, int64_t scale_cols) {
  return api::is_scale_size(rows, scale_cols) ? moe::swizzled_scale_bytes(rows, scale_cols) : -1;
}

nvfp4_moe_code nvfp4_moe_swizzle_scales(const uint8_t* linear, int64_t rows, int64_t scale_cols, uint8_t* swizzled) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_scale_size(rows, scale_cols));
    if (rows == 0 || scale_cols == 0) return {};
    NVFP4_MOE_TRY(api::check_pointer("linear", linear));
    NVFP4_MOE_TRY(api::check_pointer("swizzled", swizzled));
    moe::swizzle_scales(linear, scale_cols, rows, scale_cols, swizzled);
    return {};
  });
}

nvfp4_moe_code nvfp4_moe_unswizzle_scales(const uint8_t* swizzled, int64_t rows, int64_t scale_cols, uint8_t* linear) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(api::check_scale_size(rows, scale_cols));
    if (rows == 0 || scale_cols == 0) return {};
    NVFP4_MOE_TRY(api::check_pointer("swizzled", swizzled));
    NVFP4_MOE_TRY(api::check_pointer("linear", linear));
    moe::unswizzle_scales(swizzled, rows, scale_cols, linear, scale_cols);
    return {};
  });
}

}  // extern "C"
