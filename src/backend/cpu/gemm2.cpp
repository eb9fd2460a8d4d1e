// intermediate x down -> one row per choice, rounded once to the row format.
#include <algorithm>

#include "backend/cpu/activations.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/panel.h"
#include "backend/cpu/steps.h"

namespace nvfp4_moe::cpu {

void gemm2(const HostCall& call, const HostPart& part) {
  const MoeOptions& options = call.weights.config.options();
  const ExpertPanels panels{options.hidden_size, part.intermediate_size};
  const DType row_dtype = options.row_format == RowFormat::kBf16 ? DType::kBf16 : DType::kF32;
  for_each_panel(call, part, panels_of(options.hidden_size), [&](int64_t expert, int64_t panel) {
    const uint8_t* bytes = expert_bytes(call.weights, part, expert) + panels.down(panel);
    const float tensor_scale = expert_scales(call.weights, part, expert).down;
    float out[kTileLines][kPanelRows];
    for (int64_t row = part.row_offsets[expert]; row < part.row_offsets[expert + 1]; row += kTileLines) {
      LineTile tile{.count = std::min(kTileLines, part.row_offsets[expert + 1] - row)};
      for (int64_t i = 0; i < tile.count; ++i) tile.line[i] = row + i;
      gemm_tile(options.activation_format, part.intermediate, tile, part.intermediate_size, bytes, tensor_scale, out);
      const int64_t channels = std::min(kPanelRows, options.hidden_size - panel * kPanelRows);
      for (int64_t i = 0; i < tile.count; ++i)
        for (int64_t c = 0; c < channels; ++c)
          store(part.rows_out, row_dtype, (row + i) * options.hidden_size + panel * kPanelRows + c, out[i][c]);
    }
  });
}

}  // namespace nvfp4_moe::cpu
