// hidden -> the activations of gemm1, one line per token that has a row (every token where there is a shared expert).
#include <atomic>
#include <functional>

#include "backend/cpu/activations.h"
#include "backend/cpu/steps.h"

namespace nvfp4_moe::cpu {
namespace {

void add(uint64_t& counter, uint64_t value) {
  if (value != 0) std::atomic_ref<uint64_t>(counter).fetch_add(value, std::memory_order_relaxed);
}

bool has_row(const HostCall& call, int64_t token) {
  if (call.buffers.shared.experts > 0) return true;
  const int64_t top_k = call.weights.config->top_k;
  for (int64_t j = 0; j < top_k; ++j)
    if (call.buffers.row_of_choice[token * top_k + j] >= 0) return true;
  return false;
}

}  // namespace

void quantize(const HostCall& call) {
  const MoeConfig& config = call.weights.config;
  const float scale = resolve_activation_scales(config, call.weights.scales)->hidden;
  RunStatus& status = *call.buffers.status;
  const auto body = [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      call.buffers.hidden.nonfinite[token] = 0;
      if (!has_row(call, token)) continue;
      const LineCounts counts = convert_line(
          call.batch.hidden, call.batch.hidden_dtype, token, config->hidden_size, config->activation_format, scale,
          config->activation_scale == ActivationScale::kCompat, call.buffers.hidden, token);
      add(status.hidden_blocks, counts.blocks);
      add(status.hidden_saturated, counts.saturated);
      add(status.hidden_zeroed, counts.zeroed);
      add(status.nonfinite_tokens, counts.nonfinite ? 1 : 0);
    }
  };
  call.executor.parallel_for(call.batch.tokens, 8, std::ref(body));  // by reference: nothing is allocated
}

void requantize(const HostCall& call, const HostPart& part) {
  const MoeConfig& config = call.weights.config;
  const float scale = resolve_activation_scales(config, call.weights.scales)->intermediate;
  const int64_t rows = part.row_offsets[part.experts];
  RunStatus& status = *call.buffers.status;
  const auto body = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const LineCounts counts =
          convert_line(part.intermediate.bf16, DType::kBf16, row, part.intermediate_size, config->activation_format,
                       scale, config->intermediate_scale == IntermediateScale::kCompat, part.intermediate, row);
      add(status.intermediate_blocks, counts.blocks);
      add(status.intermediate_saturated, counts.saturated);
      add(status.intermediate_zeroed, counts.zeroed);
      add(status.nonfinite_rows, counts.nonfinite ? 1 : 0);
    }
  };
  call.executor.parallel_for(rows, 8, std::ref(body));  // by reference: nothing is allocated
}

}  // namespace nvfp4_moe::cpu
