// The C interface: format functions on arrays in a device's memory.
#include "c_api/format.h"

using nvfp4_moe::internal::Status;
namespace api = nvfp4_moe::internal::c_api;
namespace formats = nvfp4_moe::internal::formats;
namespace moe = nvfp4_moe::internal;

extern "C" {

nvfp4_moe_status nvfp4_moe_device_quantize(const char* device, nvfp4_moe_quantize_mode mode,
                                           nvfp4_moe_search search, const void* x,
                                           nvfp4_moe_dtype dtype, int64_t rows, int64_t cols,
                                           float tensor_scale, uint8_t* codes,
                                           uint8_t* block_scales, float* scales, void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const int gpu, api::read_gpu(device));
    formats::Quantize call;
    NVFP4_MOE_ASSIGN(call.mode, api::read_enum("mode", mode, moe::QuantizeMode::kVllmOrder));
    NVFP4_MOE_ASSIGN(call.search, api::read_enum("search", search, moe::ScaleSearch::kSweep));
    call.x = x;
    NVFP4_MOE_ASSIGN(call.dtype, api::read_dtype("dtype", dtype, moe::DType::kBf16));
    call.rows = rows;
    call.cols = cols;
    call.tensor_scale = api::unless_zero(tensor_scale);
    call.codes = codes;
    call.block_scales = block_scales;
    call.scales = scales;
    moe::QuantizeCounts uncounted;
    return formats::quantize(formats::Place::cuda(gpu, stream), call, uncounted);
  });
}

nvfp4_moe_status nvfp4_moe_device_dequantize(const char* device, const uint8_t* codes,
                                             const uint8_t* block_scales, const float* scales,
                                             int32_t scale_of_row, int64_t rows, int64_t cols,
                                             nvfp4_moe_dtype out_dtype, void* out, void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const int gpu, api::read_gpu(device));
    if (scale_of_row != 0 && scale_of_row != 1)
      return moe::invalid_argument("scale_of_row: expected 0 or 1, got " +
                                   std::to_string(scale_of_row));
    formats::Dequantize call;
    call.codes = codes;
    call.block_scales = block_scales;
    call.scales = scales;
    call.scale_of_row = scale_of_row == 1;
    call.rows = rows;
    call.cols = cols;
    NVFP4_MOE_ASSIGN(call.out_dtype, api::read_dtype("out_dtype", out_dtype, moe::DType::kBf16));
    call.out = out;
    if (rows > 0 && cols > 0) NVFP4_MOE_TRY(api::check_pointer("scales", scales));
    return formats::dequantize(formats::Place::cuda(gpu, stream), call);
  });
}

nvfp4_moe_status nvfp4_moe_device_swiglu_quantize(const char* device,
                                                  const nvfp4_moe_swiglu* options,
                                                  const void* gate_up, int64_t rows, int64_t inner,
                                                  const float* row_weights, uint8_t* codes,
                                                  uint8_t* block_scales, float* row_scales,
                                                  void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const int gpu, api::read_gpu(device));
    NVFP4_MOE_ASSIGN(const formats::SwigluQuantize call,
                     api::read_swiglu(options, gate_up, rows, inner, row_weights,
                                      {codes, block_scales, row_scales}));
    moe::QuantizeCounts uncounted;
    return formats::swiglu_quantize(formats::Place::cuda(gpu, stream), call, uncounted);
  });
}

nvfp4_moe_status nvfp4_moe_device_swizzle_scales(const char* device, const uint8_t* linear,
                                                 int64_t matrices, int64_t rows, int64_t scale_cols,
                                                 uint8_t* swizzled, void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const int gpu, api::read_gpu(device));
    return formats::swizzle_scales(formats::Place::cuda(gpu, stream),
                                   {linear, matrices, rows, scale_cols, swizzled});
  });
}

nvfp4_moe_status nvfp4_moe_device_unswizzle_scales(const char* device, const uint8_t* swizzled,
                                                   int64_t matrices, int64_t rows,
                                                   int64_t scale_cols, uint8_t* linear,
                                                   void* stream) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(const int gpu, api::read_gpu(device));
    return formats::unswizzle_scales(formats::Place::cuda(gpu, stream),
                                     {swizzled, matrices, rows, scale_cols, linear});
  });
}

}  // extern "C"
