// One row of activations: from elements to the arrays of the contract, and from those to a kernel's
// operands.
#pragma once

#include <cstdint>

#include "backend/cpu/kernels.h"
#include "backend/cpu/scratch.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::cpu {

// Quantizes (nvfp4, int8_block, fp8) or rounds to bf16 (bf16) row `row` of data (.., k) into
// activations, and reports in `nonfinite` whether it holds NaN or Inf. For nvfp4 and fp8, scale:
// the row's, 0 for its own power of two; for nvfp4 alone, compat: vLLM's operation order with that
// scale.
struct ConvertedRow {
  RowCounts counts;
  bool nonfinite = false;
};
ConvertedRow convert_row(const Kernels& kernels, const void* data, DType dtype, int64_t row,
                         int64_t k, ActivationFormat format, float scale, bool compat,
                         const ActivationBuffers& activations, int64_t out_row);

void write_operands(const Kernels& kernels, const ActivationBuffers& activations, int64_t row,
                    const Operands& operands);

}  // namespace nvfp4_moe::internal::cpu
