// hidden and the intermediate -> activations, one line per token that has a row (every token where there is a shared
// expert) or per row; and those lines' operands.
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

bool has_row(const HostCall& call, int64_t token) {
  if (call.buffers.shared.experts > 0) return true;
  const int64_t top_k = call.weights.config->top_k;
  for (int64_t j = 0; j < top_k; ++j)
    if (call.buffers.row_of_choice[token * top_k + j] >= 0) return true;
  return false;
}

// body(line) for every line, a few at a time.
template <class Body>
void for_each_line(Executor& executor, int64_t lines, const Body& body) {
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) body(line);
  };
  const int64_t grain = lines < 8 * executor.threads() ? 1 : 8;
  executor.parallel_for(lines, grain, std::ref(range));  // by reference: nothing is allocated
}

// A token's operands, and where lines must lie at one distance a copy for each of its rows.
void write_hidden_operands(const HostCall& call, const Kernels& kernels, int64_t token, const LayerScratch& scratch) {
  write_operands(kernels, call.buffers.hidden, token, scratch.hidden);
  if (scratch.hidden_rows.bytes == nullptr) return;
  const int64_t top_k = call.weights.config->top_k;
  for (int64_t j = 0; j < top_k; ++j) {
    const int64_t row = call.buffers.row_of_choice[token * top_k + j];
    if (row >= 0)
      std::memcpy(scratch.hidden_rows.line(row), scratch.hidden.line(token),
                  static_cast<size_t>(scratch.hidden.line_bytes));
  }
}

}  // namespace

void quantize(const HostCall& call, const Kernels& kernels, const LayerScratch* scratch) {
  const MoeConfig& config = call.weights.config;
  const float scale = resolve_activation_scales(config, call.weights.scales)->hidden;
  RunStatus& status = *call.buffers.status;
  for_each_line(call.executor, call.batch.tokens, [&](int64_t token) {
    call.buffers.hidden.nonfinite[token] = 0;
    if (!has_row(call, token)) return;
    const ConvertedLine line = convert_line(
        kernels, call.batch.hidden, call.batch.hidden_dtype, token, config->hidden_size, config->activation_format,
        scale, config->activation_scale == ActivationScale::kCompat, call.buffers.hidden, token);
    add(status.hidden_blocks, line.counts.blocks);
    add(status.hidden_saturated, line.counts.saturated);
    add(status.hidden_zeroed, line.counts.zeroed);
    add(status.nonfinite_tokens, line.nonfinite ? 1 : 0);
    if (scratch != nullptr) write_hidden_operands(call, kernels, token, *scratch);
  });
}

void requantize(const HostCall& call, const HostPart& part, const Kernels& kernels, const Operands* operands) {
  const MoeConfig& config = call.weights.config;
  const float scale = resolve_activation_scales(config, call.weights.scales)->intermediate;
  RunStatus& status = *call.buffers.status;
  for_each_line(call.executor, part.row_offsets[part.experts], [&](int64_t row) {
    const ConvertedLine line = convert_line(
        kernels, part.intermediate.bf16, DType::kBf16, row, part.intermediate_size, config->activation_format, scale,
        config->intermediate_scale == IntermediateScale::kCompat, part.intermediate, row);
    add(status.intermediate_blocks, line.counts.blocks);
    add(status.intermediate_saturated, line.counts.saturated);
    add(status.intermediate_zeroed, line.counts.zeroed);
    add(status.nonfinite_rows, line.nonfinite ? 1 : 0);
    if (operands != nullptr) write_operands(kernels, part.intermediate, row, *operands);
  });
}

void hidden_operands(const HostCall& call, const Kernels& kernels, const LayerScratch& scratch) {
  for_each_line(call.executor, call.batch.tokens, [&](int64_t token) {
    if (has_row(call, token)) write_hidden_operands(call, kernels, token, scratch);
  });
}

void intermediate_operands(const HostCall& call, const HostPart& part, const Kernels& kernels,
                           const Operands& operands) {
  for_each_line(call.executor, part.row_offsets[part.experts],
                [&](int64_t row) { write_operands(kernels, part.intermediate, row, operands); });
}

}  // namespace nvfp4_moe::cpu
