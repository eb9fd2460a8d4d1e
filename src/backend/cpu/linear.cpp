#include "backend/cpu/linear.h"

#include <algorithm>
#include <functional>

#include "backend/cpu/activations.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/panel.h"
#include "backend/cpu/scratch.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::cpu {
namespace {

// The converted input and its operands. T tokens, K = cols.
struct LinearScratch {
  ActivationBuffers input;
  Operands operands;

  LinearScratch(const LinearWeights& weights, int64_t tokens, const Kernels& kernels,
                Arena& arena) {
    input.nonfinite = arena.take<uint8_t>("x", ".nonfinite", tokens);  // (T)
    if (weights.activation_format == ActivationFormat::kNvfp4) {
      input.codes = arena.take<uint8_t>("x", ".codes", tokens * weights.cols / 2);  // (T, K/2)
      // (T, K/16)
      input.block_scales = arena.take<uint8_t>("x", ".block_scales", tokens * weights.cols / 16);
      input.row_scale = arena.take<float>("x", ".row_scale", tokens);  // (T)
    } else if (weights.activation_format == ActivationFormat::kInt8Block) {
      input.int8_codes = arena.take<int8_t>("x", ".int8_codes", tokens * weights.cols);  // (T, K)
      // (T, K/16)
      input.int8_scales = arena.take<float>("x", ".int8_scales", tokens * weights.cols / 16);
    } else if (weights.activation_format == ActivationFormat::kFp8) {
      input.fp8 = arena.take<uint8_t>("x", ".fp8", tokens * weights.cols);  // (T, K)
      input.row_scale = arena.take<float>("x", ".row_scale", tokens);       // (T)
    } else {
      input.bf16 = arena.take<uint16_t>("x", ".bf16", tokens * weights.cols);  // (T, K)
    }
    operands = Operands::make(weights.activation_format, weights.cols, tokens, 1, kernels, arena,
                              "x", false);
  }
};

}  // namespace

size_t linear_bytes(int64_t rows, int64_t cols) {
  return static_cast<size_t>(panels_of(rows) * panel_bytes(cols));
}

Status linear_pack(LinearWeights& weights, const Nvfp4View& source) {
  uint8_t* bytes = reinterpret_cast<uint8_t*>(weights.bytes.data());
  for (int64_t p = 0; p < panels_of(source.rows); ++p)
    pack_panel(source, p, bytes + p * panel_bytes(source.cols));
  if (weights.activation_format == ActivationFormat::kFp8)
    weights.fp8 = measure_fp8_weights(source);
  return {};
}

size_t linear_workspace_bytes(const LinearWeights& weights, int64_t max_tokens,
                              const Kernels& kernels) {
  Arena arena;
  LinearScratch(weights, max_tokens, kernels, arena);
  return arena.size_bytes();
}

Status linear_run(const LinearWeights& weights, const LinearBatch& batch, std::byte* workspace,
                  const RunContext& context, const Kernels& kernels) {
  Arena arena(workspace);
  const LinearScratch scratch(weights, batch.tokens, kernels, arena);
  const bool vllm_order = weights.activation_scale == ActivationScale::kVllmOrder;
  const float scale =
      weights.activation_scale == ActivationScale::kDynamicToken ? 0.0f : weights.input_scale;
  const auto convert = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      convert_row(kernels, batch.x, batch.x_dtype, t, weights.cols, weights.activation_format,
                  scale, vllm_order, scratch.input, t);
      write_operands(kernels, scratch.input, t, scratch.operands);
    }
  };
  context.executor->parallel_for(batch.tokens, 8,
                                 std::ref(convert));  // by reference: no allocation

  const double weight_scale = matrix_scale(weights.tensor_scale, weights.fp8);
  const PanelMatrix matrix{reinterpret_cast<const uint8_t*>(weights.bytes.data()),
                           panels_of(weights.rows),
                           {weights.fp8.shift, weights.fp8.shift}};
  for_ranges(*context.executor, strips_of(matrix.panels), least_strips(batch.tokens),
             [&](int64_t begin, int64_t end) {
               const auto prepare = [&](RowBlock& block) {
                 for (int64_t i = 0; i < block.count; ++i) {
                   block.rows[i] = scratch.operands.row(block.first + i);
                   block.alpha[0][i] = row_alpha(scratch.input, block.first + i, weight_scale);
                 }
               };
               const auto epilogue = [&](const RowBlock& block, int64_t strip,
                                         int64_t strip_panels) {
                 kernels.round(rows_of_block(block, strip_panels, batch.out, batch.out_dtype,
                                             weights.rows, block.first, strip * kStripRows));
               };
               multiply_strips(kernels, scratch.operands, matrix, begin, end, batch.tokens, prepare,
                               epilogue);
             });
  return {};
}

}  // namespace nvfp4_moe::internal::cpu
