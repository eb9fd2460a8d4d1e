// quantize: hidden (T, H) -> routed.hidden and shared.hidden, one row per token.
//
// Under on_input the routed experts multiply weighted_hidden = hidden * weight, where the weight
// and the product are rounded to hidden's dtype; it is then quantized like any hidden. The shared
// expert multiplies hidden. Otherwise both parts multiply the same arrays.
//
// nvfp4: codes (T, H/2), block scales (T, H/16), row scale (T). int8_block: codes (T, H), scales
// (T, H/16). fp8: E4M3 bytes (T, H), row scale (T). All three from hidden's own values. bf16:
// hidden rounded once. Only tokens with a row are read. A token without rows enters no statistics;
// its arrays stay unchanged, with nonfinite = 0.
#include <functional>

#include "backend/reference/formats.h"
#include "backend/reference/quantize_row.h"
#include "backend/reference/steps.h"

namespace nvfp4_moe::internal::reference {
namespace {

bool has_routed_row(const StepContext& step, int64_t token) {
  const int64_t top_k = step.weights.config->top_k;
  for (int64_t k = 0; k < top_k; ++k)
    if (step.buffers.row_of_assignment[token * top_k + k] >= 0) return true;
  return false;
}

ScalePolicy hidden_policy(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  if (config->activation_scale == ActivationScale::kDynamicToken) return {};
  const float scale = resolve_activation_scales(config, step.weights.scales)
                          ->hidden;  // make_plan has already resolved them successfully
  return {config->activation_scale == ActivationScale::kVllmOrder ? ScalePolicy::kVllmOrder
                                                                  : ScalePolicy::kPowerOfTwo,
          scale};
}

// Computes weighted_hidden of one token. The product of two numbers of hidden's dtype is exact in
// double.
void scale_hidden(const StepContext& step, int64_t token) {
  const Batch& batch = step.batch;
  const int64_t cols = step.weights.config->hidden_size;
  const double weight = round_to(format_of(batch.hidden_dtype), double{batch.topk_weights[token]});
  for (int64_t i = token * cols; i < (token + 1) * cols; ++i)
    store(step.buffers.weighted_hidden, batch.hidden_dtype, i,
          load(batch.hidden, batch.hidden_dtype, i) * weight);
}

}  // namespace

void quantize(const StepContext& step) {
  const Batch& batch = step.batch;
  const PartBuffers &routed = step.buffers.routed, &shared = step.buffers.shared;
  const bool on_input = router_weight_on_input(step.weights.config),
             has_shared = shared.experts > 0;
  const int64_t cols = step.weights.config->hidden_size;
  const ActivationFormat format = step.weights.config->activation_format;
  const ScalePolicy policy = row_scale_range(format) > 0 ? hidden_policy(step) : ScalePolicy{};

  auto body = [&](int64_t begin, int64_t end) {
    RowCounts counts;
    uint64_t nonfinite = 0;
    for (int64_t token = begin; token < end; ++token) {
      const bool has_row = has_routed_row(step, token);
      const auto convert = [&](const void* x, const ActivationBuffers& to) {
        convert_row(format, x, batch.hidden_dtype, token * cols, cols, policy, to, token, counts);
        return to.nonfinite[token] != 0;
      };
      bool bad = false;
      routed.hidden.nonfinite[token] = 0;
      if (on_input && has_row) {
        scale_hidden(step, token);
        bad = convert(step.buffers.weighted_hidden, routed.hidden);
      }
      if (on_input ? has_shared : has_row || has_shared)
        bad |= convert(batch.hidden, on_input ? shared.hidden : routed.hidden);
      nonfinite += bad;
    }
    RunStatus& status = *step.buffers.status;
    add_count(status.nonfinite_tokens, nonfinite);
    add_count(status.hidden_blocks, counts.blocks);
    add_count(status.hidden_saturated, counts.saturated);
    add_count(status.hidden_zeroed, counts.zeroed);
  };
  step.executor.parallel_for(batch.tokens, 4, std::ref(body));
}

}  // namespace nvfp4_moe::internal::reference
