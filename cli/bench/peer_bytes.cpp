#include "cli/bench/peer_bytes.h"

#include <vector>

#include "backend/device_exchange.h"
#include "parallel/all_reduce.h"

namespace nvfp4_moe::internal::cli {

PeerBytes peer_bytes(const RankCombine& ranks, const RandomTokens& batch) {
  const MoeConfig& config = ranks.config();
  const Placement& placement = ranks.placement();
  const int world = placement.world(), self = ranks.exchange().rank();
  const CombineBy combine = ranks.options().combine;
  if (combine == CombineBy::kAllReduce)
    return {0, PeerAllReduce::sent_bytes(batch.tokens * config->hidden_size,
                                         ranks.max_tokens() * config->hidden_size, world,
                                         DType::kBf16)};
  const PacketFormat packet(config);
  const int64_t top_k = config->top_k,
                none_bytes = 8 * top_k;  // slots and weights of a token without experts on the rank
  const std::vector<int32_t> slots = slots_of(batch, top_k, placement, combine);
  PeerBytes bytes;
  for (int source = 0; source < world; ++source) {
    const int64_t end = first_token(batch.tokens, source + 1, world);
    for (int64_t token = first_token(batch.tokens, source, world); token < end; ++token) {
      std::vector<int64_t> rows(static_cast<size_t>(world));
      for (int64_t k = 0; k < top_k; ++k)
        if (const int32_t slot = slots[static_cast<size_t>(token * top_k + k)]; slot >= 0)
          ++rows[static_cast<size_t>(placement.rank_of(slot))];
      if (source != self) {
        bytes.combine += rows[static_cast<size_t>(self)] * packet.row_bytes;
        continue;
      }
      for (int expert = 0; expert < world; ++expert)
        if (expert != self)
          bytes.dispatch += rows[static_cast<size_t>(expert)] > 0 ? packet.bytes : none_bytes;
    }
  }
  return bytes;
}

}  // namespace nvfp4_moe::internal::cli
