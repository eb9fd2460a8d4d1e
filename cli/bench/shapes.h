// Shapes: sizes of known models by name, for bench and explain without a checkpoint.
#pragma once

#include <string>
#include <vector>

#include "core/config.h"
#include "core/nvfp4_view.h"
#include "core/status.h"

namespace nvfp4_moe::internal::cli {

struct Shape {
  const char* name;
  int64_t num_experts;  // of the model
  int64_t local_experts;
  int64_t top_k;
  int64_t hidden_size;
  int64_t intermediate_size;
  float swiglu_limit;  // 0: no limit
  Activation activation = swiglu_limit > 0 ? Activation::kSwigluClamped : Activation::kSwiglu;
};
const std::vector<Shape>& shapes();
std::string shape_names();  // "deepseek-v4-pro, ..."

// The shape's options and local experts. experts > 0 replaces the number of experts, all of them
// local.
struct ShapedLayer {
  MoeOptions options;
  ExpertRange range;
};
Result<ShapedLayer> shaped_layer(const std::string& name, int64_t experts);

}  // namespace nvfp4_moe::internal::cli
