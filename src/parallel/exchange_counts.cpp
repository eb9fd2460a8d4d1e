// A header of fixed size, then the rank's counts: one exchange gathers both.
#include "parallel/exchange_counts.h"

#include <cstring>
#include <iterator>
#include <string>

namespace nvfp4_moe::internal {

Status ExchangeCounts::gather(Exchange& exchange, int64_t tokens, const Status& mine,
                              bool captured) {
  struct Header {
    int64_t tokens;
    int32_t captured;
    SentStatus<496> status;
  };
  static_assert(sizeof(Header) == kHeader * sizeof(int64_t));
  const Header sent{tokens, captured ? 1 : 0, SentStatus<496>(mine)};
  std::memcpy(mine_.data(), &sent, sizeof(sent));
  const size_t bytes = mine_.size() * sizeof(int64_t);
  NVFP4_MOE_TRY(exchange.all_gather(mine_.data(), static_cast<int64_t>(bytes), messages_.data()));
  if (std::memcmp(message(exchange.rank()), mine_.data(), bytes) != 0)
    return io_error(
        "exchange counts: expected this rank's own bytes back from the exchange, got others");
  const auto header = [this](int rank) {
    Header of_rank;
    std::memcpy(&of_rank, message(rank), sizeof(of_rank));
    return of_rank;
  };
  for (int rank = 0; rank < exchange.world(); ++rank) {
    if (const auto sent_by = header(rank).status; sent_by.code != 0)
      return sent_by.failure().in("rank " + std::to_string(rank));
    int64_t least = this->tokens(rank);
    for (int64_t index = 0; index < std::ssize(own()); ++index)
      least = std::min(least, count(rank, index));
    if (least < 0)  // they determine array offsets
      return io_error("exchange counts of rank " + std::to_string(rank) +
                      ": expected counts from 0, got " + std::to_string(least));
  }
  const bool first = header(0).captured != 0;
  for (int rank = 1; rank < exchange.world(); ++rank)
    if ((header(rank).captured != 0) != first)
      return invalid_argument("stream of rank " + std::to_string(rank) + ": expected one that is " +
                              (first ? "captured, as on rank 0, got one that is not"
                                     : "not captured, as on rank 0, got one that is"));
  return {};
}

PacketCounts::PacketCounts(int world, int64_t capacity, bool fixed, int64_t top_k)
    : ExchangeCounts(world, 2 * int64_t{world}),
      world_(world),
      capacity_(capacity),
      fixed_(fixed),
      top_k_(top_k) {}

Status PacketCounts::too_many(int64_t tokens, int64_t source, int64_t expert, int64_t capacity) {
  return invalid_argument("capacity: expected at least " + std::to_string(tokens) +
                          " tokens, which rank " + std::to_string(source) + " has for rank " +
                          std::to_string(expert) + ", got " + std::to_string(capacity));
}

Status PacketCounts::check_possible(int source, int expert) const {
  const int64_t all = tokens(source), some = tokens_between(source, expert),
                rows = rows_between(source, expert);
  if (some <= all && rows / top_k_ + (rows % top_k_ != 0) <= some) return {};
  return io_error("exchange counts of rank " + std::to_string(source) + ": expected at most " +
                  std::to_string(all) + " tokens for rank " + std::to_string(expert) + ", of " +
                  std::to_string(top_k_) + " rows each, got " + std::to_string(some) + " and " +
                  std::to_string(rows) + " rows");
}

Status PacketCounts::gather(Exchange& exchange, int64_t tokens, const Status& mine, bool captured) {
  NVFP4_MOE_TRY(ExchangeCounts::gather(exchange, tokens, mine, captured));
  int source = 0, expert = 0;
  for (int s = 0; s < world_; ++s)
    for (int e = 0; e < world_; ++e) {
      NVFP4_MOE_TRY(check_possible(s, e));
      if (tokens_between(s, e) > tokens_between(source, expert)) source = s, expert = e;
    }
  if (tokens_between(source, expert) <= capacity_) return {};
  return too_many(tokens_between(source, expert), source, expert, capacity_);
}

}  // namespace nvfp4_moe::internal
