// Small float checkpoints, and what the quantizer makes of their experts.
#pragma once

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "checkpoint/experts.h"
#include "checkpoint/float_experts.h"
#include "convert/quantize_checkpoint.h"
#include "convert/synthesize.h"

namespace nvfp4_moe::internal::test {

inline SynthesizeOptions tiny_model(int64_t layers = 1, int64_t experts = 2, int64_t hidden = 32,
                                    int64_t intermediate = 16) {
  return {.layers = layers,
          .num_experts = experts,
          .top_k = std::min<int64_t>(experts, 2),
          .hidden_size = hidden,
          .intermediate_size = intermediate,
          .vocab_size = 32,
          .max_shard_bytes = 100 << 10};
}

// The codes and scales of an expert are those of the quantizer; gate and up share a tensor scale.
// weights: of gate's and up's columns, and of down's. Adds gate's quality.
inline void expect_quantized(const std::string& in, const std::string& out, int64_t layer,
                             int64_t expert, ScaleSearch search,
                             const std::vector<float>& hidden_weights = {},
                             const std::vector<float>& intermediate_weights = {},
                             QuantizationQuality* gate = nullptr) {
  SCOPED_TRACE(testing::Message() << "layer " << layer << " expert " << expert);
  const auto source = must(Checkpoint::open(in)), target = must(Checkpoint::open(out));
  auto floats = must(float_expert(*source, layer, expert));
  const auto loaded = must(target->expert(layer, expert));
  FloatWeights* const matrices[] = {&floats->gate, &floats->up, &floats->down};
  const Nvfp4View* const views[] = {&loaded->source.gate, &loaded->source.up, &loaded->source.down};
  std::vector<float> x[3];
  for (size_t p = 0; p < 3; ++p) {
    FloatWeights& matrix = *matrices[p];
    ASSERT_OK(matrix.fetch());
    x[p].resize(static_cast<size_t>(matrix.rows * matrix.cols));
    for (int64_t r = 0; r < matrix.rows; ++r) matrix.read_row(r, x[p].data() + r * matrix.cols);
  }
  const float both = std::max(row_amax(x[0]), row_amax(x[1]));
  for (size_t p = 0; p < 3; ++p) {
    const float scale = tensor_scale_from_amax(p == 2 ? row_amax(x[2]) : both);
    std::vector<uint8_t> codes(x[p].size() / 2), scales(x[p].size() / 16);
    QuantizationQuality quality;
    ASSERT_OK(quantize_weights(x[p], views[p]->rows, views[p]->cols, scale, search, codes.data(),
                               scales.data(), quality.counts, &quality.sum_sq,
                               &quality.sum_sq_error,
                               p == 2 ? intermediate_weights : hidden_weights));
    EXPECT_FLOAT_EQ(views[p]->tensor_scale, scale) << "matrix " << p;
    EXPECT_EQ(scales_of(*views[p]), scales) << "matrix " << p;
    EXPECT_EQ(codes_of(*views[p]), codes) << "matrix " << p;
    if (p == 0 && gate != nullptr) *gate += quality;
  }
}

inline void change_byte(const std::string& path, uint64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(at));
  file.put(static_cast<char>(byte ^ 1));
}

}  // namespace nvfp4_moe::internal::test
