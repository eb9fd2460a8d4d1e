// intermediate x down -> a row for each assignment, with the expert's bias, rounded once to the row
// format.
#include "backend/cpu/steps.h"

namespace nvfp4_moe::internal::cpu {

void multiply_down(const StepContext& step, const PartBuffers& part, const Kernels& kernels,
                   const LayerScratch& scratch) {
  const MoeOptions& options = step.weights.config.options();
  const ExpertPanels layout = expert_panels(step.weights.config, part.intermediate_size);
  const DType row_dtype = options.row_format == RowFormat::kBf16 ? DType::kBf16 : DType::kF32;
  const int64_t hidden = options.hidden_size, panels = panels_of(hidden);
  const Operands& operands = scratch.intermediate(part);
  for_each_strip(
      step, part, strips_of(panels), scratch.active_experts,
      [&](int64_t expert, int64_t begin, int64_t end) {
        const Fp8Weights fp8 = expert_fp8(step.weights, part, expert).down;
        const double scale = matrix_scale(expert_scales(step.weights, part, expert).down, fp8);
        const float* bias = expert_biases(step.weights, part, expert).down;
        const PanelMatrix matrix{expert_bytes(step.weights, part, expert) + layout.down(0),
                                 panels,
                                 {fp8.shift, fp8.shift}};
        const int64_t first_row = part.row_offsets[expert];
        const auto prepare = [&](RowBlock& block) {
          for (int64_t i = 0; i < block.count; ++i) {
            const int64_t row = first_row + block.first + i;
            block.rows[i] = operands.row(row);
            block.alpha[0][i] = row_alpha(part.intermediate, row, scale);
          }
        };
        const auto epilogue = [&](const RowBlock& block, int64_t strip, int64_t strip_panels) {
          kernels.round(rows_of_block(block, strip_panels, part.rows_out, row_dtype, hidden,
                                      first_row + block.first, strip * kStripRows, bias));
        };
        multiply_strips(kernels, operands, matrix, begin, end,
                        part.row_offsets[expert + 1] - first_row, prepare, epilogue);
      });
}

}  // namespace nvfp4_moe::internal::cpu
