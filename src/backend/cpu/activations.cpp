#include "backend/cpu/activations.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/quantize.h"

namespace nvfp4_moe::cpu {

ConvertedLine convert_line(const Kernels& kernels, const void* data, DType dtype, int64_t line, int64_t k,
                           ActivationFormat format, float scale, bool compat, const ActivationBuffers& activations,
                           int64_t out_line) {
  ConvertedLine result;
  const void* x = static_cast<const std::byte*>(data) + line * k * bits(dtype) / 8;
  const float amax = kernels.amax(x, dtype, k);
  result.nonfinite = !std::isfinite(amax);
  activations.nonfinite[out_line] = result.nonfinite ? 1 : 0;

  if (format == ActivationFormat::kBf16) {
    if (activations.bf16 == data)  // the intermediate is bf16 already, and gemm2 multiplies NaN and Inf as they are
      activations.nonfinite[out_line] = 0;
    else
      kernels.to_bf16(x, dtype, k, activations.bf16 + out_line * k);
    return result;
  }

  if (format == ActivationFormat::kInt8Block) {
    int8_t* int8_codes = activations.int8_codes + out_line * k;
    float* scales = activations.int8_scales + out_line * (k / kBlockElems);
    if (!result.nonfinite) {
      result.counts = kernels.quantize_int8(x, dtype, k, int8_codes, scales);
      return result;
    }
    std::memset(int8_codes, 0, static_cast<size_t>(k));
    std::fill_n(scales, k / kBlockElems, std::numeric_limits<float>::quiet_NaN());
    return result;
  }

  uint8_t* codes = activations.codes + out_line * k / 2;
  uint8_t* block_scales = activations.block_scales + out_line * k / kBlockElems;
  if (result.nonfinite) {
    activations.row_scale[out_line] = scale == 0.0f ? 1.0f : scale;
    std::memset(codes, 0, static_cast<size_t>(k / 2));
    std::memset(block_scales, 0, static_cast<size_t>(k / kBlockElems));
    return result;
  }
  if (scale == 0.0f) scale = dynamic_token_scale(amax);
  activations.row_scale[out_line] = scale;
  result.counts = kernels.quantize(
      {.x = x, .dtype = dtype, .k = k, .scale = scale, .compat = compat, .codes = codes, .block_scales = block_scales});
  return result;
}

void write_operands(const Kernels& kernels, const ActivationBuffers& activations, int64_t line,
                    const Operands& operands) {
  const int64_t k = operands.k;
  if (operands.format == ActivationFormat::kBf16)
    return kernels.bf16_operands(activations.bf16 + line * k, k, operands.line(line));
  if (operands.format == ActivationFormat::kInt8Block)
    return kernels.int8_operands(activations.int8_codes + line * k, activations.int8_scales + line * (k / kBlockElems),
                                 k, operands.line(line));
  kernels.nvfp4_operands(activations.codes + line * k / 2, activations.block_scales + line * k / kBlockElems, k,
                         operands.line(line));
}

}  // namespace nvfp4_moe::cpu
