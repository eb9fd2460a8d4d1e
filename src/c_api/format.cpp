// The C interface: format functions from host arrays to host arrays.
#include "c_api/format.h"

using nvfp4_moe::internal::Result;
using nvfp4_moe::internal::Status;
namespace api = nvfp4_moe::internal::c_api;
namespace formats = nvfp4_moe::internal::formats;
namespace moe = nvfp4_moe::internal;

namespace {

// Reads the first field of a caller's struct, or a caller's number. Neither need be aligned before
// the checks.
size_t size_of(const nvfp4_moe_quantize_counts* counts) {
  size_t size = 0;
  std::memcpy(&size, counts, sizeof(size));
  return size;
}
float number_at(const float* number) {
  float value = 0;
  std::memcpy(&value, number, sizeof(value));
  return value;
}

// Runs body(counts). Checks a caller's struct_size before any work is done and arrays are written.
template <class Body>
nvfp4_moe_status counted(nvfp4_moe_quantize_counts* out, Body&& body) {
  return api::guarded([&]() -> Status {
    if (out != nullptr)
      NVFP4_MOE_TRY(
          api::check_struct_size("counts", size_of(out), sizeof(nvfp4_moe_quantize_counts)));
    moe::QuantizeCounts counts;
    NVFP4_MOE_TRY(body(counts));
    if (out == nullptr) return {};
    const nvfp4_moe_quantize_counts c{
        sizeof(c),          counts.blocks,          counts.saturated_scales,
        counts.zero_scales, counts.saturated_codes, counts.nonfinite_rows};
    return api::write_struct("counts", c, out);
  });
}

Result<formats::Quantize> read_quantize(moe::QuantizeMode mode, const void* x,
                                        nvfp4_moe_dtype dtype, int64_t rows, int64_t cols,
                                        uint8_t* codes, uint8_t* block_scales) {
  formats::Quantize call;
  call.mode = mode;
  call.x = x;
  NVFP4_MOE_ASSIGN(call.dtype, api::read_dtype("dtype", dtype, moe::DType::kBf16));
  call.rows = rows;
  call.cols = cols;
  call.codes = codes;
  call.block_scales = block_scales;
  call.nonfinite_rows = formats::NonfiniteRows::kZeroed;
  return call;
}

formats::ToFp8 fp8_of(int64_t rows, int64_t cols, int64_t block_rows, int64_t block_cols) {
  formats::ToFp8 call;
  call.rows = rows;
  call.cols = cols;
  if (block_rows != 0 || block_cols != 0) call.block = {block_rows, block_cols};
  return call;
}

}  // namespace

extern "C" {

nvfp4_moe_status nvfp4_moe_quantize(const void* x, nvfp4_moe_dtype dtype, int64_t rows,
                                    int64_t cols, nvfp4_moe_search search, float* tensor_scale,
                                    uint8_t* codes, uint8_t* block_scales,
                                    nvfp4_moe_quantize_counts* counts) {
  return counted(counts, [&](moe::QuantizeCounts& total) -> Status {
    NVFP4_MOE_TRY(api::check_pointer("tensor_scale", tensor_scale));
    NVFP4_MOE_ASSIGN(formats::Quantize call, read_quantize(moe::QuantizeMode::kWeights, x, dtype,
                                                           rows, cols, codes, block_scales));
    NVFP4_MOE_ASSIGN(call.search, api::read_enum("search", search, moe::ScaleSearch::kSweep));
    call.tensor_scale = api::unless_zero(number_at(tensor_scale));
    call.scales = tensor_scale;
    return formats::quantize(formats::Place::host(), call, total);
  });
}

nvfp4_moe_status nvfp4_moe_quantize_dynamic_token(const void* x, nvfp4_moe_dtype dtype,
                                                  int64_t rows, int64_t cols, uint8_t* codes,
                                                  uint8_t* block_scales, float* row_scales,
                                                  nvfp4_moe_quantize_counts* counts) {
  return counted(counts, [&](moe::QuantizeCounts& total) -> Status {
    NVFP4_MOE_ASSIGN(formats::Quantize call, read_quantize(moe::QuantizeMode::kDynamicToken, x,
                                                           dtype, rows, cols, codes, block_scales));
    call.scales = row_scales;
    return formats::quantize(formats::Place::host(), call, total);
  });
}

nvfp4_moe_status nvfp4_moe_quantize_static(const void* x, nvfp4_moe_dtype dtype, int64_t rows,
                                           int64_t cols, float* tensor_scale, uint8_t* codes,
                                           uint8_t* block_scales,
                                           nvfp4_moe_quantize_counts* counts) {
  return counted(counts, [&](moe::QuantizeCounts& total) -> Status {
    NVFP4_MOE_TRY(api::check_pointer("tensor_scale", tensor_scale));
    NVFP4_MOE_ASSIGN(formats::Quantize call, read_quantize(moe::QuantizeMode::kStatic, x, dtype,
                                                           rows, cols, codes, block_scales));
    call.tensor_scale = number_at(tensor_scale);
    call.scales = tensor_scale;
    return formats::quantize(formats::Place::host(), call, total);
  });
}

nvfp4_moe_status nvfp4_moe_quantize_vllm_order(const void* x, nvfp4_moe_dtype dtype, int64_t rows,
                                               int64_t cols, float tensor_scale, uint8_t* codes,
                                               uint8_t* block_scales,
                                               nvfp4_moe_quantize_counts* counts) {
  return counted(counts, [&](moe::QuantizeCounts& total) -> Status {
    NVFP4_MOE_ASSIGN(formats::Quantize call, read_quantize(moe::QuantizeMode::kVllmOrder, x, dtype,
                                                           rows, cols, codes, block_scales));
    call.tensor_scale = tensor_scale;
    call.scales = &tensor_scale;
    return formats::quantize(formats::Place::host(), call, total);
  });
}

nvfp4_moe_status nvfp4_moe_quantize_int8_block(const void* x, nvfp4_moe_dtype dtype, int64_t rows,
                                               int64_t cols, int8_t* codes, float* block_scales,
                                               nvfp4_moe_quantize_counts* counts) {
  return counted(counts, [&](moe::QuantizeCounts& total) -> Status {
    formats::QuantizeInt8Block call{x, moe::DType::kBf16, rows, cols, codes, block_scales};
    NVFP4_MOE_ASSIGN(call.dtype, api::read_dtype("dtype", dtype, moe::DType::kBf16));
    return formats::quantize_int8_block(call, total);
  });
}

nvfp4_moe_status nvfp4_moe_swiglu_quantize(const nvfp4_moe_swiglu* options, const void* gate_up,
                                           int64_t rows, int64_t inner, const float* row_weights,
                                           uint8_t* codes, uint8_t* block_scales, float* row_scales,
                                           nvfp4_moe_quantize_counts* counts) {
  return counted(counts, [&](moe::QuantizeCounts& total) -> Status {
    NVFP4_MOE_ASSIGN(const formats::SwigluQuantize call,
                     api::read_swiglu(options, gate_up, rows, inner, row_weights,
                                      {codes, block_scales, row_scales}));
    return formats::swiglu_quantize(formats::Place::host(), call, total);
  });
}

nvfp4_moe_status nvfp4_moe_dequantize(const uint8_t* codes, const uint8_t* block_scales,
                                      float tensor_scale, int64_t rows, int64_t cols,
                                      nvfp4_moe_dtype out_dtype, void* out) {
  return api::guarded([&]() -> Status {
    formats::Dequantize call;
    call.codes = codes;
    call.block_scales = block_scales;
    call.tensor_scale = tensor_scale;
    call.rows = rows;
    call.cols = cols;
    NVFP4_MOE_ASSIGN(call.out_dtype, api::read_dtype("out_dtype", out_dtype, moe::DType::kBf16));
    call.out = out;
    return formats::dequantize(formats::Place::host(), call);
  });
}

nvfp4_moe_status nvfp4_moe_convert_to_fp8(const uint8_t* codes, const uint8_t* block_scales,
                                          float tensor_scale, int64_t rows, int64_t cols,
                                          int64_t block_rows, int64_t block_cols, uint8_t* out,
                                          float* scales) {
  return api::guarded([&]() -> Status {
    formats::ToFp8 call = fp8_of(rows, cols, block_rows, block_cols);
    call.codes = codes;
    call.block_scales = block_scales;
    call.tensor_scale = tensor_scale;
    call.out = out;
    call.scales = scales;
    return formats::to_fp8(call);
  });
}

int64_t nvfp4_moe_fp8_scale_count(int64_t rows, int64_t cols, int64_t block_rows,
                                  int64_t block_cols) {
  int64_t count = -1;
  api::guarded([&]() -> Status {
    const formats::ToFp8 call = fp8_of(rows, cols, block_rows, block_cols);
    NVFP4_MOE_ASSIGN(const auto scales, formats::fp8_scales(call.rows, call.cols, call.block));
    count = scales.first * scales.second;
    return {};
  });
  return count;
}

nvfp4_moe_status nvfp4_moe_pack_codes(const uint8_t* values, int64_t count, uint8_t* packed) {
  return api::guarded([&] { return formats::pack_codes(values, count, packed); });
}

nvfp4_moe_status nvfp4_moe_unpack_codes(const uint8_t* packed, int64_t count, uint8_t* values) {
  return api::guarded([&] { return formats::unpack_codes(packed, count, values); });
}

int64_t nvfp4_moe_swizzled_bytes(int64_t rows, int64_t scale_cols) {
  int64_t bytes = -1;
  api::guarded([&]() -> Status {
    NVFP4_MOE_ASSIGN(bytes, formats::swizzled_bytes(rows, scale_cols));
    return {};
  });
  return bytes;
}

nvfp4_moe_status nvfp4_moe_swizzle_scales(const uint8_t* linear, int64_t rows, int64_t scale_cols,
                                          uint8_t* swizzled) {
  return api::guarded([&] {
    return formats::swizzle_scales(formats::Place::host(), {linear, 1, rows, scale_cols, swizzled});
  });
}

nvfp4_moe_status nvfp4_moe_unswizzle_scales(const uint8_t* swizzled, int64_t rows,
                                            int64_t scale_cols, uint8_t* linear) {
  return api::guarded([&] {
    return formats::unswizzle_scales(formats::Place::host(),
                                     {swizzled, 1, rows, scale_cols, linear});
  });
}

}  // extern "C"
