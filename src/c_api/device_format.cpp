// The C interface: the format by itself, on arrays in a device's memory. Sizes, pointers and choices are checked here;
// what is in the arrays is not read.
#include <cmath>

#include "backend/device_formats.h"
#include "c_api/format.h"
#include "core/quantize.h"
#include "moe/batch_check.h"
#include "moe/registry.h"

using nvfp4_moe::invalid_argument;
using nvfp4_moe::Status;
namespace api = nvfp4_moe::c_api;
namespace moe = nvfp4_moe;

namespace {

Status check_device(int32_t device) {
  if (device >= 0) return {};
  return invalid_argument("device: expected N of cuda:N, got " + std::to_string(device));
}
// Asked last, so that a mistake in a call is told as one in every build.
moe::Result<const moe::DeviceFormats*> formats_of(int32_t device) {
  const moe::DeviceFormats* const formats = moe::device_formats(moe::DeviceKind::kCuda);
  if (formats == nullptr)
    return moe::unsupported("device cuda:" + std::to_string(device) + ": this build has no CUDA backend");
  return formats;
}

// (matrices, rows, scale_cols), padding included, inside int64.
Status check_matrices(int64_t matrices, int64_t rows, int64_t scale_cols) {
  NVFP4_MOE_TRY(api::check_scale_size(rows, scale_cols));
  if (matrices >= 0 && matrices <= api::kMaxSide && (rows + 128) * (scale_cols + 4) <= api::kMaxSide) return {};
  return invalid_argument("matrices: expected 0 to 2^30 of at most 2^30 scales each, got " + std::to_string(matrices) +
                          " of (" + std::to_string(rows) + ", " + std::to_string(scale_cols) + ")");
}

}  // namespace

extern "C" {

nvfp4_moe_code nvfp4_moe_device_quantize(int32_t device, int32_t how, const void* x, nvfp4_moe_dtype dtype,
                                         int64_t rows, int64_t cols, float tensor_scale, uint8_t* codes,
                                         uint8_t* block_scales, float* scales, void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(check_device(device));
    moe::DeviceQuantize call;
    NVFP4_MOE_ASSIGN(call.how, api::read_enum("how", how, moe::DeviceQuantizer::kCompat));
    NVFP4_MOE_TRY(api::check_matrix_size(rows, cols));
    NVFP4_MOE_ASSIGN(call.dtype, api::read_dtype("dtype", dtype, moe::DType::kBf16));
    NVFP4_MOE_TRY(moe::check_activation_dtype("x", call.dtype));
    const bool weights = call.how == moe::DeviceQuantizer::kWeights || call.how == moe::DeviceQuantizer::kWeightsMse;
    const bool normal = std::isnormal(tensor_scale) && tensor_scale > 0;
    if (call.how == moe::DeviceQuantizer::kDynamicToken && tensor_scale != 0.0f)
      return invalid_argument("tensor_scale: every row has its own, expected 0, got " + std::to_string(tensor_scale));
    if (call.how == moe::DeviceQuantizer::kPowerOfTwo && !moe::is_power_of_two(tensor_scale))
      return invalid_argument("tensor_scale: expected a normal power of two, got " + std::to_string(tensor_scale));
    if (call.how == moe::DeviceQuantizer::kCompat && !normal)
      return invalid_argument("tensor_scale: expected a positive normal number, got " + std::to_string(tensor_scale));
    if (weights && tensor_scale != 0.0f && !(std::isfinite(tensor_scale) && tensor_scale > 0))
      return invalid_argument("tensor_scale: expected a positive number, or 0 for x's own, got " +
                              std::to_string(tensor_scale));
    if (rows == 0 || cols == 0) return {};
    NVFP4_MOE_TRY(moe::check_array({"x", x, call.dtype, rows * cols}));
    NVFP4_MOE_TRY(api::check_outputs(rows, cols, codes, block_scales));
    NVFP4_MOE_TRY(moe::check_array({"scales", scales, moe::DType::kF32, 1}));
    call.x = x;
    call.rows = rows;
    call.cols = cols;
    call.tensor_scale = tensor_scale;
    call.codes = codes;
    call.block_scales = block_scales;
    call.scales = scales;
    NVFP4_MOE_ASSIGN(const moe::DeviceFormats* const formats, formats_of(device));
    return formats->quantize(device, call, stream);
  });
}

nvfp4_moe_code nvfp4_moe_device_dequantize(int32_t device, const uint8_t* codes, const uint8_t* block_scales,
                                           const float* scales, int32_t scale_of_row, int64_t rows, int64_t cols,
                                           nvfp4_moe_dtype out_dtype, void* out, void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(check_device(device));
    moe::DeviceDequantize call;
    NVFP4_MOE_TRY(api::check_matrix_size(rows, cols));
    NVFP4_MOE_ASSIGN(call.out_dtype, api::read_dtype("out_dtype", out_dtype, moe::DType::kBf16));
    NVFP4_MOE_TRY(moe::check_activation_dtype("out", call.out_dtype));
    if (scale_of_row != 0 && scale_of_row != 1)
      return invalid_argument("scale_of_row: expected 0 or 1, got " + std::to_string(scale_of_row));
    if (rows == 0 || cols == 0) return {};
    NVFP4_MOE_TRY(api::check_outputs(rows, cols, codes, block_scales));
    NVFP4_MOE_TRY(moe::check_array({"scales", scales, moe::DType::kF32, 1}));
    NVFP4_MOE_TRY(moe::check_array({"out", out, call.out_dtype, rows * cols}));
    call.codes = codes;
    call.block_scales = block_scales;
    call.scales = scales;
    call.scale_of_row = scale_of_row == 1;
    call.rows = rows;
    call.cols = cols;
    call.out = out;
    NVFP4_MOE_ASSIGN(const moe::DeviceFormats* const formats, formats_of(device));
    return formats->dequantize(device, call, stream);
  });
}

nvfp4_moe_code nvfp4_moe_device_swiglu_quantize(int32_t device, const nvfp4_moe_swiglu* options, const void* gate_up,
                                                int64_t rows, int64_t inner, const float* row_weights, uint8_t* codes,
                                                uint8_t* block_scales, float* row_scales, void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(check_device(device));
    NVFP4_MOE_ASSIGN(const api::Swiglu swiglu, api::Swiglu::read(options, rows, inner));
    if (rows == 0 || inner == 0) return {};
    NVFP4_MOE_TRY(moe::check_array({"gate_up", gate_up, swiglu.dtype, rows * inner * 2}));
    if (row_weights != nullptr) NVFP4_MOE_TRY(moe::check_array({"row_weights", row_weights, moe::DType::kF32, rows}));
    NVFP4_MOE_TRY(api::check_outputs(rows, inner, codes, block_scales));
    NVFP4_MOE_TRY(moe::check_array({"row_scales", row_scales, moe::DType::kF32, rows}));
    moe::DeviceSwigluQuantize call;
    call.activation = swiglu.activation;
    call.input = {gate_up, swiglu.dtype, rows, inner, swiglu.interleaved};
    call.row_weights = row_weights;
    call.power_of_two = swiglu.power_of_two;
    call.out = {codes, block_scales, row_scales};
    NVFP4_MOE_ASSIGN(const moe::DeviceFormats* const formats, formats_of(device));
    return formats->swiglu_quantize(device, call, stream);
  });
}

nvfp4_moe_code nvfp4_moe_device_swizzle_scales(int32_t device, const uint8_t* linear, int64_t matrices, int64_t rows,
                                               int64_t scale_cols, uint8_t* swizzled, void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(check_device(device));
    NVFP4_MOE_TRY(check_matrices(matrices, rows, scale_cols));
    if (matrices == 0 || rows == 0 || scale_cols == 0) return {};
    NVFP4_MOE_TRY(api::check_pointer("linear", linear));
    NVFP4_MOE_TRY(api::check_pointer("swizzled", swizzled));
    NVFP4_MOE_ASSIGN(const moe::DeviceFormats* const formats, formats_of(device));
    return formats->swizzle(device, linear, matrices, rows, scale_cols, swizzled, stream);
  });
}

nvfp4_moe_code nvfp4_moe_device_unswizzle_scales(int32_t device, const uint8_t* swizzled, int64_t matrices,
                                                 int64_t rows, int64_t scale_cols, uint8_t* linear, void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(check_device(device));
    NVFP4_MOE_TRY(check_matrices(matrices, rows, scale_cols));
    if (matrices == 0 || rows == 0 || scale_cols == 0) return {};
    NVFP4_MOE_TRY(api::check_pointer("swizzled", swizzled));
    NVFP4_MOE_TRY(api::check_pointer("linear", linear));
    NVFP4_MOE_ASSIGN(const moe::DeviceFormats* const formats, formats_of(device));
    return formats->unswizzle(device, swizzled, matrices, rows, scale_cols, linear, stream);
  });
}

}  // extern "C"
