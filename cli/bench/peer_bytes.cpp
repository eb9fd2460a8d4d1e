#include "cli/bench/peer_bytes.h"

#include <vector>

#include "backend/device_exchange.h"
#include "parallel/peer_reduce.h"

namespace nvfp4_moe::cli {

PeerBytes peer_bytes(const ExpertParallelLayer& layer, const RandomTokens& batch) {
  const MoeConfig& config = layer.config();
  const Placement& placement = layer.placement();
  const int world = placement.world(), self = layer.exchange().rank();
  const CombineBy combine = layer.options().combine;
  if (combine == CombineBy::kAllReduce)
    return {0, PeerReduce::sent_bytes(batch.tokens * config->hidden_size, layer.max_tokens() * config->hidden_size,
                                      world, DType::kBf16)};
  const WireRecord record(config);
  const int64_t top_k = config->top_k, none_bytes = 8 * top_k;  // slots and weights of a token without experts there
  const std::vector<int32_t> slots = slots_of(batch, top_k, placement, combine);
  PeerBytes bytes;
  for (int home = 0; home < world; ++home) {
    const int64_t end = first_token(batch.tokens, home + 1, world);
    for (int64_t token = first_token(batch.tokens, home, world); token < end; ++token) {
      std::vector<int64_t> rows(static_cast<size_t>(world));
      for (int64_t k = 0; k < top_k; ++k)
        if (const int32_t slot = slots[static_cast<size_t>(token * top_k + k)]; slot >= 0)
          ++rows[static_cast<size_t>(placement.rank_of(slot))];
      if (home != self) {
        bytes.combine += rows[static_cast<size_t>(self)] * record.row_bytes;
        continue;
      }
      for (int owner = 0; owner < world; ++owner)
        if (owner != self) bytes.dispatch += rows[static_cast<size_t>(owner)] > 0 ? record.bytes : none_bytes;
    }
  }
  return bytes;
}

}  // namespace nvfp4_moe::cli
