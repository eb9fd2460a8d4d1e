#include "backend/cpu/activations.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/quantize.h"

namespace nvfp4_moe::internal::cpu {

ConvertedRow convert_row(const Kernels& kernels, const void* data, DType dtype, int64_t row,
                         int64_t k, ActivationFormat format, float scale, bool vllm_order,
                         const ActivationBuffers& activations, int64_t out_row) {
  ConvertedRow result;
  const void* x = static_cast<const std::byte*>(data) + row * k * bits(dtype) / 8;
  const float amax = kernels.amax(x, dtype, k);
  result.nonfinite = !std::isfinite(amax);
  activations.nonfinite[out_row] = result.nonfinite ? 1 : 0;

  if (format == ActivationFormat::kBf16) {
    if (activations.bf16 ==
        data)  // the intermediate is already bf16, and gemm2 multiplies NaN and Inf as they are
      activations.nonfinite[out_row] = 0;
    else
      kernels.to_bf16(x, dtype, k, activations.bf16 + out_row * k);
    return result;
  }

  if (format == ActivationFormat::kInt8Block) {
    int8_t* int8_codes = activations.int8_codes + out_row * k;
    float* scales = activations.int8_scales + out_row * (k / kBlockElems);
    if (!result.nonfinite) {
      result.counts = kernels.quantize_int8(x, dtype, k, int8_codes, scales);
      return result;
    }
    std::memset(int8_codes, 0, static_cast<size_t>(k));
    std::fill_n(scales, k / kBlockElems, std::numeric_limits<float>::quiet_NaN());
    return result;
  }

  if (format == ActivationFormat::kFp8) {
    uint8_t* codes = activations.fp8 + out_row * k;
    if (scale == 0.0f) scale = result.nonfinite ? 1.0f : fp8_token_scale(amax);
    activations.row_scale[out_row] = scale;
    if (result.nonfinite)
      std::memset(codes, 0, static_cast<size_t>(k));
    else
      result.counts = kernels.quantize_fp8(x, dtype, k, scale, codes);
    return result;
  }

  uint8_t* codes = activations.codes + out_row * k / 2;
  uint8_t* block_scales = activations.block_scales + out_row * k / kBlockElems;
  if (result.nonfinite) {
    activations.row_scale[out_row] = scale == 0.0f ? 1.0f : scale;
    std::memset(codes, 0, static_cast<size_t>(k / 2));
    std::memset(block_scales, 0, static_cast<size_t>(k / kBlockElems));
    return result;
  }
  if (scale == 0.0f) scale = dynamic_token_scale(amax);
  activations.row_scale[out_row] = scale;
  result.counts = kernels.quantize({.x = x,
                                    .dtype = dtype,
                                    .k = k,
                                    .scale = scale,
                                    .vllm_order = vllm_order,
                                    .codes = codes,
                                    .block_scales = block_scales});
  return result;
}

void write_operands(const Kernels& kernels, const ActivationBuffers& activations, int64_t row,
                    const Operands& operands) {
  const int64_t k = operands.k;
  if (operands.format == ActivationFormat::kBf16) {
    kernels.bf16_operands(activations.bf16 + row * k, k, operands.row(row));
    if (operands.for_single_row) kernels.single_row_operands(k, operands.row(row));
    return;
  }
  if (operands.format == ActivationFormat::kInt8Block)
    return kernels.int8_operands(activations.int8_codes + row * k,
                                 activations.int8_scales + row * (k / kBlockElems), k,
                                 operands.row(row));
  if (operands.format == ActivationFormat::kFp8)
    return kernels.fp8_operands(activations.fp8 + row * k, k, operands.row(row));
  kernels.nvfp4_operands(activations.codes + row * k / 2,
                         activations.block_scales + row * k / kBlockElems, k, operands.row(row));
}

}  // namespace nvfp4_moe::internal::cpu
