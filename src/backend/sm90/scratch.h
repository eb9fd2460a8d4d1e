// What the sm90 backend keeps beside the walk's arrays: the CUDA backends' common part, and the partial sums of units
// that were cut along K.
#pragma once

#include <algorithm>

#include "backend/cuda/packed_tile.h"
#include "backend/cuda/scratch.h"
#include "backend/sm90/variant.h"

namespace nvfp4_moe::sm90 {

struct Scratch {
  cuda::Scratch common;
  float* partials = nullptr;  // two a block
  size_t total_bytes = 0;

  // base null: measures. tokens: of the call, or the limit.
  Scratch(const MoeConfig& config, const ExpertRange& range, int64_t tokens, std::byte* base)
      : common(config, range, tokens, base) {
    if (base != nullptr) partials = reinterpret_cast<float*>(base + common.total_bytes);
    total_bytes = common.total_bytes;
    const int64_t longest_k =
        std::max({config->hidden_size, config->intermediate_size, config->shared_intermediate_size});
    if (!splits(config, cuda::ceil_div(longest_k, cuda::kTileK))) return;
    const bool shared = config->shared_intermediate_size > 0;
    const size_t last = std::max(routed_variant(config, tokens), shared ? shared_variant(tokens) : 0);
    int64_t largest = 0;
    for (size_t i = 0; i <= last; ++i) largest = std::max(largest, kVariants[i].partial_bytes());
    total_bytes += static_cast<size_t>(2 * kMostBlocks * largest);
  }
};

}  // namespace nvfp4_moe::sm90
