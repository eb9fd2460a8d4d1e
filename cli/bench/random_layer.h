// RandomLayer: a layer's experts and tokens from a seed, without a checkpoint. For `bench --shape`
// and self-tests.
//
// Codes are uniform random bytes, so that every code occurs. Block scales are in [0.75, 1.375].
// Tensor scales bring each projection's outputs to about 1. An expert depends only on the seed and
// its global id, not on the local range.
#pragma once

#include <cstdint>
#include <vector>

#include "core/batch.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal::cli {

// The returned source makes each expert on request, so packing needs memory for only one expert.
LayerSource random_layer(const MoeOptions& options, uint64_t seed);

struct RandomTokens {
  std::vector<uint16_t> hidden;  // (tokens, hidden_size) bf16, roughly normal with deviation 1
  std::vector<int32_t> ids;      // (tokens, top_k) distinct experts of the range, uniform
  std::vector<float> weights;    // (tokens, top_k), summing to 1 per token
  std::vector<uint16_t> out;     // (tokens, hidden_size) bf16
  int64_t tokens = 0;
  Batch batch();  // borrows the arrays above
  std::vector<float> out_floats() const;
};
RandomTokens random_tokens(const MoeOptions& options, const ExpertRange& range, int64_t tokens,
                           uint64_t seed);

}  // namespace nvfp4_moe::internal::cli
