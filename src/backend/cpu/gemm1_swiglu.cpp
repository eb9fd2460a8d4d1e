// hidden x gate, up -> SwiGLU (times the router weight under before_down) -> bf16 intermediate. A
// strip is a gate panel and its up panel: 16 channels of SwiGLU. gate and up have separate alphas,
// applied to the fp32 accumulators before the biases and the activation function. Without a gate
// (relu2) a strip is two up panels, 32 channels, divided and rounded as in gemm2.
#include "backend/cpu/steps.h"

namespace nvfp4_moe::internal::cpu {

void multiply_gate_up(const StepContext& step, const PartBuffers& part, const Kernels& kernels,
                      const LayerScratch& scratch) {
  const MoeOptions& options = step.weights.config.options();
  const bool gated = has_gate(options.activation);
  const bool weighted =
      options.router_weight == RouterWeight::kBeforeDown && part.assignment_of_row != nullptr;
  const int64_t panels = expert_panels(step.weights.config, part.intermediate_size).gemm1_panels();
  const Operands& operands = scratch.gemm1(part);
  const bool by_row = scratch.by_row(part);
  for_each_strip(
      step, part, strips_of(panels), scratch.active_experts,
      [&](int64_t expert, int64_t begin, int64_t end) {
        const TensorScales& scales = expert_scales(step.weights, part, expert);
        const ExpertBiases biases = expert_biases(step.weights, part, expert);
        const Fp8ExpertWeights fp8 = expert_fp8(step.weights, part, expert);
        const double up_scale = matrix_scale(scales.up, fp8.up);
        // The scale of a strip's first panel, and the shifts of both.
        const double first_scale = gated ? matrix_scale(scales.gate, fp8.gate) : up_scale;
        const PanelMatrix matrix{expert_bytes(step.weights, part, expert),
                                 panels,
                                 {gated ? fp8.gate.shift : fp8.up.shift, fp8.up.shift}};
        const int64_t first_row = part.row_offsets[expert];
        const auto prepare = [&](RowBlock& block) {
          for (int64_t i = 0; i < block.count; ++i) {
            const int64_t row = first_row + block.first + i,
                          token = token_of_row(part, row, options.top_k);
            block.rows[i] = operands.row(by_row ? row : token);
            block.alpha[0][i] = row_alpha(part.hidden, token, first_scale);
            if (gated) block.alpha[1][i] = row_alpha(part.hidden, token, up_scale);
            if (weighted) block.weight[i] = step.batch.topk_weights[part.assignment_of_row[row]];
          }
        };
        const auto swiglu = [&](const RowBlock& block, int64_t strip, int64_t) {
          const int64_t row = first_row + block.first, channel = strip * kPanelRows;
          kernels.swiglu(options,
                         {.acc = block.acc,
                          .count = block.count,
                          .gate_alpha = block.alpha[0],
                          .up_alpha = block.alpha[1],
                          .gate_bias = biases.gate == nullptr ? nullptr : biases.gate + channel,
                          .up_bias = biases.up == nullptr ? nullptr : biases.up + channel,
                          .weight = weighted ? block.weight : nullptr,
                          .out = part.intermediate.bf16 + row * part.intermediate_size + channel,
                          .stride = part.intermediate_size});
        };
        const auto relu2 = [&](const RowBlock& block, int64_t strip, int64_t strip_panels) {
          RoundRows rows = rows_of_block(block, strip_panels, part.intermediate.bf16, DType::kBf16,
                                         part.intermediate_size, first_row + block.first,
                                         strip * kStripRows, biases.up);
          rows.relu2 = true;
          rows.weight = weighted ? block.weight : nullptr;
          kernels.round(rows);
        };
        const int64_t rows = part.row_offsets[expert + 1] - first_row;
        if (gated)
          multiply_strips(kernels, operands, matrix, begin, end, rows, prepare, swiglu);
        else
          multiply_strips(kernels, operands, matrix, begin, end, rows, prepare, relu2);
      });
}

}  // namespace nvfp4_moe::internal::cpu
