#include "backend/cpu/activations.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "core/float_formats.h"
#include "core/quantize.h"

namespace nvfp4_moe::cpu {

void load16(const void* data, DType dtype, int64_t index, float* values) {
  if (dtype == DType::kF32) {
    std::memcpy(values, static_cast<const float*>(data) + index, 16 * sizeof(float));
    return;
  }
  const uint16_t* bits = static_cast<const uint16_t*>(data) + index;
  for (int i = 0; i < 16; ++i) values[i] = dtype == DType::kBf16 ? bf16_to_float(bits[i]) : fp16_to_float(bits[i]);
}

void store(void* data, DType dtype, int64_t index, float value) {
  if (dtype == DType::kF32)
    static_cast<float*>(data)[index] = value;
  else
    static_cast<uint16_t*>(data)[index] = dtype == DType::kBf16 ? bf16_from_float(value) : fp16_from_float(value);
}

LineCounts convert_line(const void* data, DType dtype, int64_t line, int64_t k, ActivationFormat format, float scale,
                        bool compat, const HostActivations& activations, int64_t out_line) {
  LineCounts counts;
  float values[kBlockElems];
  float amax = 0.0f;
  for (int64_t begin = 0; begin < k; begin += kBlockElems) {
    load16(data, dtype, line * k + begin, values);
    const float block = row_amax(values);
    if (!std::isfinite(block)) counts.nonfinite = true;
    amax = std::max(amax, block);
  }
  activations.nonfinite[out_line] = counts.nonfinite ? 1 : 0;

  if (format == ActivationFormat::kBf16) {
    if (activations.bf16 == data) {  // the intermediate is bf16 already, and gemm2 multiplies NaN and Inf as they are
      activations.nonfinite[out_line] = 0;
      return counts;
    }
    for (int64_t begin = 0; begin < k; begin += kBlockElems) {
      load16(data, dtype, line * k + begin, values);
      for (int i = 0; i < kBlockElems; ++i) activations.bf16[out_line * k + begin + i] = bf16_from_float(values[i]);
    }
    return counts;
  }

  if (scale == 0.0f) scale = counts.nonfinite ? 1.0f : dynamic_token_scale(amax);
  activations.line_scale[out_line] = scale;
  uint8_t* codes = activations.codes + out_line * k / 2;
  uint8_t* scales = activations.block_scales + out_line * k / kBlockElems;
  if (counts.nonfinite) {
    std::memset(codes, 0, static_cast<size_t>(k / 2));
    std::memset(scales, 0, static_cast<size_t>(k / kBlockElems));
    return counts;
  }
  QuantizeCounts quantized;
  for (int64_t b = 0; b < k / kBlockElems; ++b) {
    load16(data, dtype, line * k + b * kBlockElems, values);
    if (compat)
      quantize_row_compat(values, scale, codes + b * 8, scales + b, quantized);
    else
      quantize_row_exact(values, scale, codes + b * 8, scales + b, quantized);
  }
  counts.blocks = quantized.blocks;
  counts.saturated = quantized.saturated_scales;
  counts.zeroed = quantized.zero_scales;
  return counts;
}

}  // namespace nvfp4_moe::cpu
