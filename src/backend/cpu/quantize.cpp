// hidden and the intermediate -> activations and their operands: for each token that has a row in
// expert order (for every token if there is a shared expert), and for each row in expert order.
// Under on_input the routed experts multiply hidden times the router weight, and the shared expert
// multiplies hidden itself.
#include <cstring>
#include <functional>

#include "backend/cpu/activations.h"
#include "backend/cpu/steps.h"
#include "core/float_formats.h"

namespace nvfp4_moe::internal::cpu {
namespace {

bool has_routed_row(const StepContext& step, int64_t token) {
  const int64_t top_k = step.weights.config->top_k;
  for (int64_t j = 0; j < top_k; ++j)
    if (step.buffers.row_of_assignment[token * top_k + j] >= 0) return true;
  return false;
}

// The rows of a token: one of routed.hidden, which is also the shared expert's, and under on_input
// a separate one of shared.hidden. Each exists only if it is read.
struct HiddenRows {
  bool routed, shared;

  HiddenRows(const StepContext& step, int64_t token) {
    const bool has_shared = step.buffers.shared.experts > 0,
               on_input = router_weight_on_input(step.weights.config);
    routed = (has_shared && !on_input) || has_routed_row(step, token);
    shared = has_shared && on_input;
  }
};

// Calls body(row) for every row, several per task.
template <class Body>
void for_each_row(Executor& executor, int64_t rows, const Body& body) {
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  };
  const int64_t grain = rows < 8 * executor.threads() ? 1 : 8;
  executor.parallel_for(rows, grain, std::ref(range));  // by reference: no allocation
}

// Writes a token's operands and, if operands must be equally spaced, a copy for each of its rows in
// expert order.
void write_hidden_operands(const StepContext& step, const Kernels& kernels, int64_t token,
                           const LayerScratch& scratch) {
  write_operands(kernels, step.buffers.routed.hidden, token, scratch.hidden);
  if (scratch.hidden_rows.bytes == nullptr) return;
  const int64_t top_k = step.weights.config->top_k;
  for (int64_t j = 0; j < top_k; ++j) {
    const int64_t row = step.buffers.row_of_assignment[token * top_k + j];
    if (row >= 0)
      std::memcpy(scratch.hidden_rows.row(row), scratch.hidden.row(token),
                  static_cast<size_t>(scratch.hidden.row_bytes));
  }
}

// Computes weighted_hidden of one token: hidden times its router weight, rounded to hidden's dtype.
void scale_hidden(const StepContext& step, const Kernels& kernels, int64_t token) {
  const Batch& batch = step.batch;
  const int64_t k = step.weights.config->hidden_size, row_bytes = k * bits(batch.hidden_dtype) / 8;
  float weight = batch.topk_weights[token];  // top_k is 1
  if (batch.hidden_dtype == DType::kBf16) weight = bf16_to_float(bf16_from_float(weight));
  if (batch.hidden_dtype == DType::kF16) weight = fp16_to_float(fp16_from_float(weight));
  kernels.scale_hidden(static_cast<const std::byte*>(batch.hidden) + token * row_bytes,
                       batch.hidden_dtype, k, weight,
                       static_cast<std::byte*>(step.buffers.weighted_hidden) + token * row_bytes);
}

}  // namespace

void quantize(const StepContext& step, const Kernels& kernels, const LayerScratch* scratch) {
  const MoeConfig& config = step.weights.config;
  const float scale = resolve_activation_scales(config, step.weights.scales)->hidden;
  RunStatus& status = *step.buffers.status;
  const Batch& batch = step.batch;
  const ActivationBuffers &routed = step.buffers.routed.hidden,
                          &shared = step.buffers.shared.hidden;
  // True if the row is nonfinite.
  const auto convert = [&](const void* x, int64_t token, const ActivationBuffers& to) {
    const ConvertedRow converted = convert_row(
        kernels, x, batch.hidden_dtype, token, config->hidden_size, config->activation_format,
        scale, config->activation_scale == ActivationScale::kVllmOrder, to, token);
    add_count(status.hidden_blocks, converted.counts.blocks);
    add_count(status.hidden_saturated, converted.counts.saturated);
    add_count(status.hidden_zeroed, converted.counts.zeroed);
    return converted.nonfinite;
  };
  for_each_row(step.executor, batch.tokens, [&](int64_t token) {
    routed.nonfinite[token] = 0;
    const HiddenRows rows(step, token);
    bool nonfinite = false;
    if (rows.routed) {
      const bool on_input = router_weight_on_input(config);
      if (on_input) scale_hidden(step, kernels, token);
      nonfinite = convert(on_input ? step.buffers.weighted_hidden : batch.hidden, token, routed);
      if (scratch != nullptr) write_hidden_operands(step, kernels, token, *scratch);
    }
    if (rows.shared) {
      nonfinite |= convert(batch.hidden, token, shared);
      if (scratch != nullptr) write_operands(kernels, shared, token, scratch->shared_hidden);
    }
    add_count(status.nonfinite_tokens, nonfinite ? 1 : 0);
  });
}

void requantize(const StepContext& step, const PartBuffers& part, const Kernels& kernels,
                const Operands* operands) {
  const MoeConfig& config = step.weights.config;
  const float scale = resolve_activation_scales(config, step.weights.scales)->intermediate;
  RunStatus& status = *step.buffers.status;
  for_each_row(step.executor, part.row_offsets[part.experts], [&](int64_t row) {
    const ConvertedRow converted = convert_row(
        kernels, part.intermediate.bf16, DType::kBf16, row, part.intermediate_size,
        config->activation_format, scale,
        config->intermediate_scale == IntermediateScale::kVllmOrder, part.intermediate, row);
    add_count(status.intermediate_blocks, converted.counts.blocks);
    add_count(status.intermediate_saturated, converted.counts.saturated);
    add_count(status.intermediate_zeroed, converted.counts.zeroed);
    add_count(status.nonfinite_rows, converted.nonfinite ? 1 : 0);
    if (operands != nullptr) write_operands(kernels, part.intermediate, row, *operands);
  });
}

void hidden_operands(const StepContext& step, const Kernels& kernels, const LayerScratch& scratch) {
  for_each_row(step.executor, step.batch.tokens, [&](int64_t token) {
    const HiddenRows rows(step, token);
    if (rows.routed) write_hidden_operands(step, kernels, token, scratch);
    if (rows.shared)
      write_operands(kernels, step.buffers.shared.hidden, token, scratch.shared_hidden);
  });
}

void intermediate_operands(const StepContext& step, const PartBuffers& part, const Kernels& kernels,
                           const Operands& operands) {
  for_each_row(step.executor, part.row_offsets[part.experts],
               [&](int64_t row) { write_operands(kernels, part.intermediate, row, operands); });
}

}  // namespace nvfp4_moe::internal::cpu
