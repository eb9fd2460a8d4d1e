// Element conversions at the borders of the layer, 16 elements at a time so that no step needs a buffer of its own.
#pragma once

#include <cstdint>

#include "backend/host_layer.h"
#include "core/dtype.h"

namespace nvfp4_moe::cpu {

// values[0..15] = data[index .. index + 15] of an array of bf16, fp16 or fp32.
void load16(const void* data, DType dtype, int64_t index, float* values);
// data[index] = value, rounded once.
void store(void* data, DType dtype, int64_t index, float value);

// Quantizes (nvfp4) or rounds to bf16 (bf16) one line of k values into activations, and flags it where it holds NaN or
// Inf. scale: the line's tensor scale, 0 for its own power of two; compat: vLLM's operation order with that scale.
struct LineCounts {
  uint64_t blocks = 0, saturated = 0, zeroed = 0;
  bool nonfinite = false;
};
LineCounts convert_line(const void* data, DType dtype, int64_t line, int64_t k, ActivationFormat format, float scale,
                        bool compat, const HostActivations& activations, int64_t out_line);

}  // namespace nvfp4_moe::cpu
