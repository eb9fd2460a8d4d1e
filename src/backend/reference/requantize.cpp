// requantize: part.intermediate.bf16 (R, I) -> its codes and scales (nvfp4, int8_block, fp8), and
// its nonfinite rows.
//
// A nonfinite row is counted. If rows are quantized, its `nonfinite` is 1 and gemm2 gives a row of
// NaN. Under bf16 it stays 0, and gemm2 multiplies the values as they are.
#include <cmath>
#include <functional>

#include "backend/reference/formats.h"
#include "backend/reference/quantize_row.h"
#include "backend/reference/steps.h"

namespace nvfp4_moe::internal::reference {
namespace {

ScalePolicy intermediate_policy(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  if (config->intermediate_scale == IntermediateScale::kDynamicToken) return {};
  const float scale = resolve_activation_scales(config, step.weights.scales)
                          ->intermediate;  // make_plan has already resolved them successfully
  return {config->intermediate_scale == IntermediateScale::kVllmOrder ? ScalePolicy::kVllmOrder
                                                                      : ScalePolicy::kPowerOfTwo,
          scale};
}

bool all_finite(const uint16_t* values, int64_t cols) {
  for (int64_t i = 0; i < cols; ++i)
    if (!std::isfinite(bf16_value(values[i]))) return false;
  return true;
}

}  // namespace

void requantize(const StepContext& step, const PartBuffers& part) {
  const ActivationBuffers& intermediate = part.intermediate;
  const int64_t cols = part.intermediate_size;
  const ActivationFormat format = step.weights.config->activation_format;
  const ScalePolicy policy =
      row_scale_range(format) > 0 ? intermediate_policy(step) : ScalePolicy{};

  auto body = [&](int64_t begin, int64_t end) {
    RowCounts counts;
    uint64_t nonfinite = 0;
    for (int64_t row = begin; row < end; ++row) {
      nonfinite += !all_finite(intermediate.bf16 + row * cols, cols);
      intermediate.nonfinite[row] = 0;
      if (format != ActivationFormat::kBf16)
        convert_row(format, intermediate.bf16, DType::kBf16, row * cols, cols, policy, intermediate,
                    row, counts);
    }
    RunStatus& status = *step.buffers.status;
    add_count(status.nonfinite_rows, nonfinite);
    add_count(status.intermediate_blocks, counts.blocks);
    add_count(status.intermediate_saturated, counts.saturated);
    add_count(status.intermediate_zeroed, counts.zeroed);
  };
  step.executor.parallel_for(part.row_offsets[part.experts], 4, std::ref(body));
}

}  // namespace nvfp4_moe::internal::reference
