// One line of activations: from elements to the arrays of the contract, and from those to a kernel's operands.
#pragma once

#include <cstdint>

#include "backend/cpu/kernels.h"
#include "backend/cpu/scratch.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::cpu {

// Quantizes (nvfp4, int8_block) or rounds to bf16 (bf16) line `line` of data (.., k) into activations, and flags it
// where it holds NaN or Inf. Of nvfp4 alone, scale: the line's tensor scale, 0 for its own power of two; compat: vLLM's
// operation order with that scale.
struct ConvertedLine {
  LineCounts counts;
  bool nonfinite = false;
};
ConvertedLine convert_line(const Kernels& kernels, const void* data, DType dtype, int64_t line, int64_t k,
                           ActivationFormat format, float scale, bool compat, const ActivationBuffers& activations,
                           int64_t out_line);

void write_operands(const Kernels& kernels, const ActivationBuffers& activations, int64_t line,
                    const Operands& operands);

}  // namespace nvfp4_moe::cpu
