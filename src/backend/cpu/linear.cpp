#include "backend/cpu/linear.h"

#include <algorithm>

#include "backend/cpu/activations.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/panel.h"
#include "backend/host_layer.h"

namespace nvfp4_moe::cpu {
namespace {

// The converted input: one walk that measures and places. T tokens, K = cols.
struct LinearSpans {
  WorkspaceLayout layout;
  int nonfinite, codes = -1, block_scales = -1, line_scale = -1, bf16 = -1;

  LinearSpans(const LinearWeights& weights, int64_t tokens) {
    const auto bytes = [](int64_t n) { return static_cast<size_t>(n); };
    nonfinite = layout.add("nonfinite", bytes(tokens));  // (T)
    if (weights.activation_format == ActivationFormat::kNvfp4) {
      codes = layout.add("codes", bytes(tokens * weights.cols / 2));                 // (T, K/2)
      block_scales = layout.add("block_scales", bytes(tokens * weights.cols / 16));  // (T, K/16)
      line_scale = layout.add("line_scale", bytes(tokens * 4));                      // (T)
    } else {
      bf16 = layout.add("bf16", bytes(tokens * weights.cols * 2));  // (T, K)
    }
  }
};

}  // namespace

size_t linear_bytes(int64_t rows, int64_t cols) { return static_cast<size_t>(panels_of(rows) * panel_bytes(cols)); }

Status linear_pack(LinearWeights& weights, const Nvfp4View& source) {
  uint8_t* bytes = reinterpret_cast<uint8_t*>(weights.bytes.data());
  for (int64_t p = 0; p < panels_of(source.rows); ++p) pack_panel(source, p, bytes + p * panel_bytes(source.cols));
  return {};
}

size_t linear_workspace_bytes(const LinearWeights& weights, int64_t max_tokens) {
  return LinearSpans(weights, max_tokens).layout.total_bytes();
}

Status linear_run(const LinearWeights& weights, const LinearBatch& batch, std::byte* workspace,
                  const RunContext& context) {
  const LinearSpans spans(weights, batch.tokens);
  NVFP4_MOE_ASSIGN(const Workspace view, Workspace::make(workspace, spans.layout.total_bytes(), spans.layout));
  HostActivations input;
  input.nonfinite = view.at<uint8_t>(spans.nonfinite);
  if (weights.activation_format == ActivationFormat::kNvfp4) {
    input.codes = view.at<uint8_t>(spans.codes);
    input.block_scales = view.at<uint8_t>(spans.block_scales);
    input.line_scale = view.at<float>(spans.line_scale);
  } else {
    input.bf16 = view.at<uint16_t>(spans.bf16);
  }

  const bool compat = weights.activation_scale == ActivationScale::kCompat;
  const float scale = weights.activation_scale == ActivationScale::kDynamicToken ? 0.0f : weights.input_scale;
  context.executor->parallel_for(batch.tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      convert_line(batch.x, batch.x_dtype, t, weights.cols, weights.activation_format, scale, compat, input, t);
  });

  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(weights.bytes.data());
  context.executor->parallel_for(panels_of(weights.rows), 1, [&](int64_t begin, int64_t end) {
    float out[kTileLines][kPanelRows];
    for (int64_t p = begin; p < end; ++p) {
      const int64_t channels = std::min(kPanelRows, weights.rows - p * kPanelRows);
      for (int64_t t = 0; t < batch.tokens; t += kTileLines) {
        LineTile tile{.count = std::min(kTileLines, batch.tokens - t)};
        for (int64_t i = 0; i < tile.count; ++i) tile.line[i] = t + i;
        gemm_tile(weights.activation_format, input, tile, weights.cols, bytes + p * panel_bytes(weights.cols),
                  weights.tensor_scale, out);
        for (int64_t i = 0; i < tile.count; ++i)
          for (int64_t c = 0; c < channels; ++c)
            store(batch.out, batch.out_dtype, (t + i) * weights.rows + p * kPanelRows + c, out[i][c]);
      }
    }
  });
  return {};
}

}  // namespace nvfp4_moe::cpu
