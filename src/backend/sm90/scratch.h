// What the sm90 backend keeps beside the walk's arrays: the CUDA backends' common part, and for units that are cut
// along K the sums of their pieces and the counters at which these arrive.
#pragma once

#include <algorithm>

#include "backend/cuda/packed_tile.h"
#include "backend/cuda/scratch.h"
#include "backend/sm90/variant.h"

namespace nvfp4_moe::sm90 {

struct Scratch {
  static constexpr size_t kArrivalBytes = (kMostBlocks * sizeof(int32_t) + 255) / 256 * 256;
  cuda::Scratch common;
  int32_t* arrivals = nullptr;  // (kMostBlocks), cleared by route and by the last to arrive
  float* partials = nullptr;    // two a block
  size_t total_bytes = 0;

  // base null: measures. tokens: of the call, or the limit.
  Scratch(const MoeConfig& config, const ExpertRange& range, int64_t tokens, std::byte* base)
      : common(config, range, tokens, base) {
    if (base != nullptr) {
      arrivals = reinterpret_cast<int32_t*>(base + common.total_bytes);
      partials = reinterpret_cast<float*>(base + common.total_bytes + kArrivalBytes);
    }
    total_bytes = common.total_bytes + kArrivalBytes;
    const int64_t longest_k =
        std::max({config->hidden_size, config->intermediate_size, config->shared_intermediate_size});
    if (!splits(config, cuda::ceil_div(longest_k, cuda::kTileK))) return;
    const bool shared = config->shared_intermediate_size > 0;
    const size_t last = std::max(routed_variant(config, range, tokens), shared ? shared_variant(tokens) : 0);
    int64_t largest = 0;
    for (size_t i = 0; i <= last; ++i) largest = std::max(largest, kVariants[i].partial_bytes());
    total_bytes += static_cast<size_t>(2 * kMostBlocks * largest);
  }
};

}  // namespace nvfp4_moe::sm90
