// quantize: hidden (T, H) -> buffers.hidden, one row per token.
//
// nvfp4: codes (T, H/2), block scales (T, H/16), row scale (T), from hidden's own values. int8_block: codes (T, H),
// scales (T, H/16), from hidden's own values. bf16: hidden rounded once. Only tokens with a row are read: a token
// without one enters no statistic and leaves what belongs to it as it was, with nonfinite = 0.
#include <functional>

#include "backend/reference/quantize_row.h"
#include "backend/reference/steps.h"

namespace nvfp4_moe::reference {
namespace {

bool has_row(const StepContext& step, int64_t token) {
  if (step.buffers.shared.experts > 0) return true;
  const int64_t top_k = step.weights.config->top_k;
  for (int64_t k = 0; k < top_k; ++k)
    if (step.buffers.row_of_assignment[token * top_k + k] >= 0) return true;
  return false;
}

ScalePolicy hidden_policy(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  if (config->activation_scale == ActivationScale::kDynamicToken) return {};
  const float scale =
      resolve_activation_scales(config, step.weights.scales)->hidden;  // make_plan has resolved them once
  return {config->activation_scale == ActivationScale::kCompat ? ScalePolicy::kCompat : ScalePolicy::kPowerOfTwo,
          scale};
}

}  // namespace

void quantize(const StepContext& step) {
  const Batch& batch = step.batch;
  const ActivationBuffers& hidden = step.buffers.hidden;
  const int64_t cols = step.weights.config->hidden_size;
  const ActivationFormat format = step.weights.config->activation_format;
  const ScalePolicy policy = format == ActivationFormat::kNvfp4 ? hidden_policy(step) : ScalePolicy{};

  auto body = [&](int64_t begin, int64_t end) {
    RowCounts counts;
    uint64_t nonfinite = 0;
    for (int64_t token = begin; token < end; ++token) {
      hidden.nonfinite[token] = 0;
      if (!has_row(step, token)) continue;
      convert_row(format, batch.hidden, batch.hidden_dtype, token * cols, cols, policy, hidden, token, counts);
      nonfinite += hidden.nonfinite[token];
    }
    RunStatus& status = *step.buffers.status;
    add_count(status.nonfinite_tokens, nonfinite);
    add_count(status.hidden_blocks, counts.blocks);
    add_count(status.hidden_saturated, counts.saturated);
    add_count(status.hidden_zeroed, counts.zeroed);
  };
  step.executor.parallel_for(batch.tokens, 4, std::ref(body));
}

}  // namespace nvfp4_moe::reference
