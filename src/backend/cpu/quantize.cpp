// hidden and the intermediate -> activations and their operands: for each token that has a row in expert order (for
// every token where there is a shared expert), and for each row in expert order.
#include <atomic>
#include <cstring>
#include <functional>

#include "backend/cpu/activations.h"
#include "backend/cpu/steps.h"

namespace nvfp4_moe::cpu {
namespace {

void add(uint64_t& counter, uint64_t value) {
  if (value != 0) std::atomic_ref<uint64_t>(counter).fetch_add(value, std::memory_order_relaxed);
}

bool has_row(const StepContext& step, int64_t token) {
  if (step.buffers.shared.experts > 0) return true;
  const int64_t top_k = step.weights.config->top_k;
  for (int64_t j = 0; j < top_k; ++j)
    if (step.buffers.row_of_assignment[token * top_k + j] >= 0) return true;
  return false;
}

// body(row) for every row, several to a task.
template <class Body>
void for_each_row(Executor& executor, int64_t rows, const Body& body) {
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  };
  const int64_t grain = rows < 8 * executor.threads() ? 1 : 8;
  executor.parallel_for(rows, grain, std::ref(range));  // by reference: nothing is allocated
}

// A token's operands, and, where operands must lie at one distance, a copy for each of its rows in expert order.
void write_hidden_operands(const StepContext& step, const Kernels& kernels, int64_t token,
                           const LayerScratch& scratch) {
  write_operands(kernels, step.buffers.hidden, token, scratch.hidden);
  if (scratch.hidden_rows.bytes == nullptr) return;
  const int64_t top_k = step.weights.config->top_k;
  for (int64_t j = 0; j < top_k; ++j) {
    const int64_t row = step.buffers.row_of_assignment[token * top_k + j];
    if (row >= 0)
      std::memcpy(scratch.hidden_rows.row(row), scratch.hidden.row(token),
                  static_cast<size_t>(scratch.hidden.row_bytes));
  }
}

}  // namespace

void quantize(const StepContext& step, const Kernels& kernels, const LayerScratch* scratch) {
  const MoeConfig& config = step.weights.config;
  const float scale = resolve_activation_scales(config, step.weights.scales)->hidden;
  RunStatus& status = *step.buffers.status;
  for_each_row(step.executor, step.batch.tokens, [&](int64_t token) {
    step.buffers.hidden.nonfinite[token] = 0;
    if (!has_row(step, token)) return;
    const ConvertedRow converted = convert_row(
        kernels, step.batch.hidden, step.batch.hidden_dtype, token, config->hidden_size, config->activation_format,
        scale, config->activation_scale == ActivationScale::kCompat, step.buffers.hidden, token);
    add(status.hidden_blocks, converted.counts.blocks);
    add(status.hidden_saturated, converted.counts.saturated);
    add(status.hidden_zeroed, converted.counts.zeroed);
    add(status.nonfinite_tokens, converted.nonfinite ? 1 : 0);
    if (scratch != nullptr) write_hidden_operands(step, kernels, token, *scratch);
  });
}

void requantize(const StepContext& step, const PartBuffers& part, const Kernels& kernels, const Operands* operands) {
  const MoeConfig& config = step.weights.config;
  const float scale = resolve_activation_scales(config, step.weights.scales)->intermediate;
  RunStatus& status = *step.buffers.status;
  for_each_row(step.executor, part.row_offsets[part.experts], [&](int64_t row) {
    const ConvertedRow converted = convert_row(
        kernels, part.intermediate.bf16, DType::kBf16, row, part.intermediate_size, config->activation_format, scale,
        config->intermediate_scale == IntermediateScale::kCompat, part.intermediate, row);
    add(status.intermediate_blocks, converted.counts.blocks);
    add(status.intermediate_saturated, converted.counts.saturated);
    add(status.intermediate_zeroed, converted.counts.zeroed);
    add(status.nonfinite_rows, converted.nonfinite ? 1 : 0);
    if (operands != nullptr) write_operands(kernels, part.intermediate, row, *operands);
  });
}

void hidden_operands(const StepContext& step, const Kernels& kernels, const LayerScratch& scratch) {
  for_each_row(step.executor, step.batch.tokens, [&](int64_t token) {
    if (has_row(step, token)) write_hidden_operands(step, kernels, token, scratch);
  });
}

void intermediate_operands(const StepContext& step, const PartBuffers& part, const Kernels& kernels,
                           const Operands& operands) {
  for_each_row(step.executor, part.row_offsets[part.experts],
               [&](int64_t row) { write_operands(kernels, part.intermediate, row, operands); });
}

}  // namespace nvfp4_moe::cpu
