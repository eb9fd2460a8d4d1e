// Sample inputs of a layer: hidden states with router ids and weights, from a safetensors file or
// from a seed.
//
// File form, for layer L (any number T of tokens): "layers.L.hidden" or else "hidden": (T,
// hidden_size) BF16, F16 or F32. Optional, with the same prefix: "topk_ids" (T, top_k) I32 or I64
// and "topk_weights" (T, top_k) F32. If they are missing, ids and weights are drawn from the seed.
// `run` reads the same form.
//
// Seeded states: unit-variance values, each channel with a gain, about one channel in 128 an
// outlier of 8 to 24 times (which makes activations hard to quantize), the same numbers on every
// machine. Ids are distinct within a token and skewed towards low experts; weights are positive and
// sum to 1. -1 ids can be mixed in.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/config.h"
#include "core/dtype.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

struct LayerStates {
  int64_t tokens = 0;
  DType hidden_dtype = DType::kBf16;
  std::vector<uint8_t> hidden;      // (tokens, hidden_size) bytes
  std::vector<int32_t> topk_ids;    // (tokens, top_k)
  std::vector<float> topk_weights;  // (tokens, top_k)
  std::string source;               // "seeded(42)", or the file and tensor
  bool ids_from_file = false;       // false: topk_ids were drawn from the seed
  bool weights_from_file = false;   // false: topk_weights were drawn from the seed

  // hidden, ids and weights as a batch without an output.
  Batch batch() const;
};

struct StatesOptions {
  int64_t tokens = 32;  // seeded; of a file: at most this many, 0 = all of them
  uint64_t seed = 42;
  float amplitude = 1.0f;      // seeded: multiplies hidden
  double skipped_share = 0.0;  // seeded ids: share of assignments that are -1
};
LayerStates seeded_states(const MoeOptions& layer_options, int64_t layer,
                          const StatesOptions& options);
// kBadInput if the file or its shapes do not fit the layer. Ids outside [-1, num_experts) are
// refused here.
Result<LayerStates> load_states(const std::string& path, const MoeOptions& layer_options,
                                int64_t layer, const StatesOptions& options);

}  // namespace nvfp4_moe::internal
