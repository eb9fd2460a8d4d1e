// hidden x gate, up -> SwiGLU (times the router weight under before_down) -> bf16 intermediate.
// gate and up keep their own alphas, applied to the fp32 accumulators before the activation function.
#include <algorithm>

#include "backend/cpu/gemm.h"
#include "backend/cpu/panel.h"
#include "backend/cpu/steps.h"
#include "core/activation.h"
#include "core/float_formats.h"

namespace nvfp4_moe::cpu {
void gemm1_swiglu(const HostCall& call, const HostPart& part) {
  const MoeOptions& options = call.weights.config.options();
  const ExpertPanels panels{options.hidden_size, part.intermediate_size};
  const GatedActivation activation = GatedActivation::of(options);
  const bool weighted = options.router_weight == RouterWeight::kBeforeDown && part.choice_of_row != nullptr;
  for_each_panel(call, part, panels_of(part.intermediate_size), [&](int64_t expert, int64_t panel) {
    const uint8_t* bytes = expert_bytes(call.weights, part, expert);
    const TensorScales& scales = expert_scales(call.weights, part, expert);
    const int64_t channels = std::min(kPanelRows, part.intermediate_size - panel * kPanelRows);
    float gate[kTileLines][kPanelRows], up[kTileLines][kPanelRows];
    for (int64_t row = part.row_offsets[expert]; row < part.row_offsets[expert + 1]; row += kTileLines) {
      LineTile tile{.count = std::min(kTileLines, part.row_offsets[expert + 1] - row)};
      for (int64_t i = 0; i < tile.count; ++i) tile.line[i] = token_of_row(part, row + i, options.top_k);
      gemm_tile(options.activation_format, call.buffers.hidden, tile, options.hidden_size, bytes + panels.gate(panel),
                scales.gate, gate);
      gemm_tile(options.activation_format, call.buffers.hidden, tile, options.hidden_size, bytes + panels.up(panel),
                scales.up, up);
      for (int64_t i = 0; i < tile.count; ++i) {
        const float weight = weighted ? call.batch.topk_weights[part.choice_of_row[row + i]] : 1.0f;
        uint16_t* out = part.intermediate.bf16 + (row + i) * part.intermediate_size + panel * kPanelRows;
        for (int64_t c = 0; c < channels; ++c) {
          const float h = activation(gate[i][c], up[i][c]);
          out[c] = bf16_from_float(weighted ? h * weight : h);
        }
      }
    }
  });
}

}  // namespace nvfp4_moe::cpu
