// quantize: hidden (T, H) -> buffers.hidden, one line per token.
//
// nvfp4: codes (T, H/2), block scales (T, H/16), line scale (T), from hidden's own values. int8_block: codes (T, H),
// scales (T, H/16), from hidden's own values. bf16: hidden rounded once.
// Only tokens with a row are read: a token without one enters no statistic and leaves its line as it was, flag 0.
#include <functional>

#include "backend/reference/quantize_line.h"
#include "backend/reference/steps.h"

namespace nvfp4_moe::reference {
namespace {

bool has_row(const HostCall& call, int64_t token) {
  if (call.buffers.shared.experts > 0) return true;
  const int64_t top_k = call.weights.config->top_k;
  for (int64_t k = 0; k < top_k; ++k)
    if (call.buffers.row_of_choice[token * top_k + k] >= 0) return true;
  return false;
}

ScalePolicy hidden_policy(const HostCall& call) {
  const MoeConfig& config = call.weights.config;
  if (config->activation_scale == ActivationScale::kDynamicToken) return {};
  const float scale = resolve_activation_scales(config, call.weights.scales)->hidden;  // plan has seen it succeed
  return {config->activation_scale == ActivationScale::kCompat ? ScalePolicy::kCompat : ScalePolicy::kPowerOfTwo,
          scale};
}

}  // namespace

void quantize(const HostCall& call) {
  const Batch& batch = call.batch;
  const HostActivations& hidden = call.buffers.hidden;
  const int64_t cols = call.weights.config->hidden_size;
  const ActivationFormat format = call.weights.config->activation_format;
  const ScalePolicy policy = format == ActivationFormat::kNvfp4 ? hidden_policy(call) : ScalePolicy{};

  auto body = [&](int64_t begin, int64_t end) {
    LineCounts counts;
    uint64_t nonfinite = 0;
    for (int64_t token = begin; token < end; ++token) {
      hidden.nonfinite[token] = 0;
      if (!has_row(call, token)) continue;
      convert_line(format, batch.hidden, batch.hidden_dtype, token * cols, cols, policy, hidden, token, counts);
      nonfinite += hidden.nonfinite[token];
    }
    RunStatus& status = *call.buffers.status;
    add_count(status.nonfinite_tokens, nonfinite);
    add_count(status.hidden_blocks, counts.blocks);
    add_count(status.hidden_saturated, counts.saturated);
    add_count(status.hidden_zeroed, counts.zeroed);
  };
  call.executor.parallel_for(batch.tokens, 4, std::ref(body));
}

}  // namespace nvfp4_moe::reference
