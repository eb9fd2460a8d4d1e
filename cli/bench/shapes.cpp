#include "cli/bench/shapes.h"

#include <fmt/format.h>

#include <algorithm>

namespace nvfp4_moe::internal::cli {

const std::vector<Shape>& shapes() {
  // deepseek-v4-pro and kimi-k3 are one rank of eight. The hidden size of nemotron-3-super and of
  // kimi-k3 is the latent one. A and B are the sizes at which other CPU libraries are measured.
  static const std::vector<Shape> list = {
      {"deepseek-v4-pro", 384, 48, 6, 7168, 3072, 10.0f},
      {"deepseek-v4-flash", 256, 256, 6, 4096, 2048, 10.0f},
      {"qwen3-30b-a3b", 128, 128, 8, 2048, 768, 0.0f},
      {"mixtral-8x7b", 8, 8, 2, 4096, 14336, 0.0f},
      {"nemotron-3-nano", 128, 128, 6, 2688, 1856, 0.0f, Activation::kRelu2},
      {"nemotron-3-super", 512, 512, 22, 1024, 2688, 0.0f, Activation::kRelu2},
      {"kimi-k3", 896, 112, 16, 3584, 3072, 0.0f, Activation::kSitu},
      {"A", 64, 64, 6, 2048, 1408, 0.0f},
      {"B", 16, 16, 6, 4096, 2048, 0.0f},
  };
  return list;
}

std::string shape_names() {
  std::string names;
  for (const Shape& shape : shapes())
    names += (names.empty() ? "" : ", ") + std::string(shape.name);
  return names;
}

Result<ShapedLayer> shaped_layer(const std::string& name, int64_t experts) {
  const auto found = std::find_if(shapes().begin(), shapes().end(),
                                  [&](const Shape& s) { return name == s.name; });
  if (found == shapes().end()) {
    return invalid_argument(
        fmt::format("--shape: expected one of {}, got {}", shape_names(), name));
  }
  ShapedLayer layer;
  layer.options.num_experts = experts > 0 ? experts : found->num_experts;
  layer.options.top_k = std::min(found->top_k, layer.options.num_experts);
  layer.options.hidden_size = found->hidden_size;
  layer.options.intermediate_size = found->intermediate_size;
  layer.options.activation = found->activation;
  if (found->swiglu_limit > 0) layer.options.swiglu_limit = found->swiglu_limit;
  if (found->activation == Activation::kSitu) {
    layer.options.situ_gate_limit = 4.0f;
    layer.options.situ_up_limit = 25.0f;
  }
  layer.range = {0, experts > 0 ? experts : found->local_experts};
  return layer;
}

}  // namespace nvfp4_moe::internal::cli
