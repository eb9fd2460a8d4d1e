// Converts one row of activations to the arrays of the contract, and from those to a kernel's
// operands.
#pragma once

#include <cstdint>

#include "backend/cpu/kernels.h"
#include "backend/cpu/scratch.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::cpu {

// Quantizes (nvfp4, int8_block, fp8) or rounds (bf16) row `row` of data (.., k) into activations,
// and reports in `nonfinite` whether it contains NaN or Inf. scale, for nvfp4 and fp8: the row's
// scale, or 0 for its own power of two. vllm_order, only for nvfp4: use vLLM's operation order with
// that scale.
struct ConvertedRow {
  RowCounts counts;
  bool nonfinite = false;
};
ConvertedRow convert_row(const Kernels& kernels, const void* data, DType dtype, int64_t row,
                         int64_t k, ActivationFormat format, float scale, bool vllm_order,
                         const ActivationBuffers& activations, int64_t out_row);

void write_operands(const Kernels& kernels, const ActivationBuffers& activations, int64_t row,
                    const Operands& operands);

}  // namespace nvfp4_moe::internal::cpu
