#include "parallel/message_sizes.h"

#include <string>

namespace nvfp4_moe {

MessageSizes::MessageSizes(int world, int64_t capacity, bool fixed, int64_t top_k, int64_t more)
    : world_(world),
      capacity_(capacity),
      fixed_(fixed),
      top_k_(top_k),
      announcement_(world, 2 * int64_t{world} + more) {}

Status MessageSizes::too_many(int64_t tokens, int64_t home, int64_t owner, int64_t capacity) {
  return invalid_argument("capacity: expected at least " + std::to_string(tokens) + " tokens, which rank " +
                          std::to_string(home) + " has for rank " + std::to_string(owner) + ", got " +
                          std::to_string(capacity));
}

Status MessageSizes::check_possible(int home, int owner) const {
  const int64_t all = announcement_.tokens(home), tokens = tokens_between(home, owner),
                rows = rows_between(home, owner);
  if (tokens <= all && rows / top_k_ + (rows % top_k_ != 0) <= tokens) return {};
  return io_error("announcement of rank " + std::to_string(home) + ": expected at most " + std::to_string(all) +
                  " tokens for rank " + std::to_string(owner) + ", of " + std::to_string(top_k_) + " rows each, got " +
                  std::to_string(tokens) + " and " + std::to_string(rows) + " rows");
}

Status MessageSizes::announce(Exchange& exchange, int64_t tokens, const Status& mine, std::span<const int64_t> counts) {
  NVFP4_MOE_TRY(announcement_.gather(exchange, tokens, mine, counts));
  int home = 0, owner = 0;
  for (int s = 0; s < world_; ++s)
    for (int d = 0; d < world_; ++d) {
      NVFP4_MOE_TRY(check_possible(s, d));
      if (tokens_between(s, d) > tokens_between(home, owner)) home = s, owner = d;
    }
  if (tokens_between(home, owner) <= capacity_) return {};
  return too_many(tokens_between(home, owner), home, owner, capacity_);
}

}  // namespace nvfp4_moe
