// What the sm90 backend keeps beside the walk's arrays: the CUDA backends' common part, and for units that are cut
// along K the sums of their pieces and the counters at which these arrive.
#pragma once

#include <algorithm>

#include "backend/cuda/packed_tile.h"
#include "backend/cuda/scratch.h"
#include "backend/sm90/variant.h"

namespace nvfp4_moe::sm90 {

struct Scratch {
  cuda::Scratch common;
  int32_t* arrivals = nullptr;  // (kMostBlocks), cleared by route and by the last to arrive
  float* partials = nullptr;    // two a block

  Scratch(const MoeConfig& config, const ExpertRange& range, int64_t tokens, Arena& arena)
      : common(config, range, tokens, arena) {
    arrivals = arena.take<int32_t>("sm90.", "arrivals", kMostBlocks);
    const int64_t longest_k =
        std::max({config->hidden_size, config->intermediate_size, config->shared_intermediate_size});
    int64_t largest = 0;
    if (splits(config, cuda::ceil_div(longest_k, cuda::kTileK))) {
      const bool shared = config->shared_intermediate_size > 0;
      const size_t last = std::max(routed_variant(config, range, tokens), shared ? shared_variant(tokens) : 0);
      for (size_t i = 0; i <= last; ++i) largest = std::max(largest, kVariants[i].partial_bytes());
    }
    partials = arena.take<float>("sm90.", "partials", 2 * kMostBlocks * largest / static_cast<int64_t>(sizeof(float)));
  }
  explicit Scratch(const StepContext& step) : Scratch(step, step.scratch) {}

 private:
  Scratch(const StepContext& step, Arena arena)
      : Scratch(step.weights.config, step.weights.range, step.batch.tokens, arena) {}
};

}  // namespace nvfp4_moe::sm90
