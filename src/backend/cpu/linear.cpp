#include "backend/cpu/linear.h"

#include <algorithm>
#include <functional>

#include "backend/cpu/activations.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/panel.h"
#include "backend/host_layer.h"

namespace nvfp4_moe::cpu {
namespace {

// The converted input: one walk that measures and places, without a WorkspaceLayout, whose names would be allocated by
// every run. T tokens, K = cols.
struct LinearSpans {
  HostActivations input;
  size_t total_bytes = 0;

  LinearSpans(const LinearWeights& weights, int64_t tokens, std::byte* base) : base_(base) {
    input.nonfinite = take<uint8_t>(tokens);  // (T)
    if (weights.activation_format == ActivationFormat::kNvfp4) {
      input.codes = take<uint8_t>(tokens * weights.cols / 2);          // (T, K/2)
      input.block_scales = take<uint8_t>(tokens * weights.cols / 16);  // (T, K/16)
      input.line_scale = take<float>(tokens);                          // (T)
    } else {
      input.bf16 = take<uint16_t>(tokens * weights.cols);  // (T, K)
    }
  }

 private:
  template <class T>
  T* take(int64_t count) {
    T* span = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + total_bytes);
    constexpr size_t kAlign = WorkspaceLayout::kAlignment;
    total_bytes += (static_cast<size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return span;
  }
  std::byte* base_;
};

}  // namespace

size_t linear_bytes(int64_t rows, int64_t cols) { return static_cast<size_t>(panels_of(rows) * panel_bytes(cols)); }

Status linear_pack(LinearWeights& weights, const Nvfp4View& source) {
  uint8_t* bytes = reinterpret_cast<uint8_t*>(weights.bytes.data());
  for (int64_t p = 0; p < panels_of(source.rows); ++p) pack_panel(source, p, bytes + p * panel_bytes(source.cols));
  return {};
}

size_t linear_workspace_bytes(const LinearWeights& weights, int64_t max_tokens) {
  return LinearSpans(weights, max_tokens, nullptr).total_bytes;
}

Status linear_run(const LinearWeights& weights, const LinearBatch& batch, std::byte* workspace,
                  const RunContext& context) {
  const HostActivations input = LinearSpans(weights, batch.tokens, workspace).input;

  const bool compat = weights.activation_scale == ActivationScale::kCompat;
  const float scale = weights.activation_scale == ActivationScale::kDynamicToken ? 0.0f : weights.input_scale;
  const auto convert = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      convert_line(batch.x, batch.x_dtype, t, weights.cols, weights.activation_format, scale, compat, input, t);
  };
  context.executor->parallel_for(batch.tokens, 8, std::ref(convert));  // by reference: nothing is allocated

  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(weights.bytes.data());
  const auto multiply = [&](int64_t begin, int64_t end) {
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
  };
  context.executor->parallel_for(panels_of(weights.rows), 1, std::ref(multiply));  // by reference: nothing is allocated
  return {};
}

}  // namespace nvfp4_moe::cpu
