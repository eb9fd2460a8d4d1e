// What ranks send each other before a run's data: how many tokens each has, whether it can run,
// and, for all_to_all, how many packets and rows go between each two ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

class ExchangeCounts {
 public:
  // counts: how many numbers each rank sends.
  ExchangeCounts(int world, int64_t counts);

  // Ok on every rank or on none: fails with the failure of the lowest rank that has one, and with
  // kInvalidArgument if only some of the ranks capture their stream (`captured`): a graph is
  // replayed by all or by none. Allocates nothing of its own.
  Status gather(Exchange& exchange, int64_t tokens, const Status& mine, bool captured,
                std::span<const int64_t> counts = {});
  // Of the last gather.
  int64_t tokens(int rank) const;
  int64_t count(int rank, int64_t index) const;

 private:
  struct Header;
  Header header(int rank) const;

  int64_t bytes_;                    // of one rank's message: a header and its counts
  std::vector<std::byte> mine_;      // (bytes_)
  std::vector<std::byte> messages_;  // (world, bytes_)
};

// The exchange counts of all_to_all. How many packets and rows a message holds is either what the
// ranks have sent, or, under a fixed capacity, what the capacity and the source rank's tokens
// allow: known to all ranks, and the same for any routing.
class PacketCounts : public ExchangeCounts {
 public:
  // capacity: tokens from one rank to another, at most; fixed: every message is as long as such a
  // number can make it.
  PacketCounts(int world, int64_t capacity, bool fixed, int64_t top_k);

  // counts: for each rank the tokens and the rows that this one has for it. Also fails, on all
  // ranks, if one has more tokens than the capacity for another.
  Status gather(Exchange& exchange, int64_t tokens, const Status& mine, bool captured,
                std::span<const int64_t> counts);

  // As gathered.
  int64_t tokens_between(int source, int expert) const { return count(source, 2 * expert); }
  int64_t rows_between(int source, int expert) const { return count(source, 2 * expert + 1); }
  // Contents of a message, in both directions.
  int64_t packets_between(int source, int expert) const {
    return fixed_ ? fixed_packets(tokens(source)) : tokens_between(source, expert);
  }
  int64_t rows_back_between(int source, int expert) const {
    return fixed_ ? fixed_packets(tokens(source)) * top_k_ : rows_between(source, expert);
  }
  // Under a fixed capacity, in each message of a source rank with this many tokens.
  int64_t fixed_packets(int64_t tokens) const { return std::min(capacity_, tokens); }

  // The most packets that a run with this many tokens on the source rank sends.
  int64_t sent(int64_t tokens) const {
    return fixed_ ? world_ * fixed_packets(tokens) : tokens * std::min<int64_t>(top_k_, world_);
  }
  int64_t received() const { return world_ * capacity_; }
  int64_t rows_back(int64_t tokens) const { return (fixed_ ? sent(tokens) : tokens) * top_k_; }

  int64_t capacity() const { return capacity_; }
  bool fixed() const { return fixed_; }
  // That `tokens` are more than the capacity.
  static Status too_many(int64_t tokens, int64_t source, int64_t expert, int64_t capacity);

 private:
  // That the counts of a pair of ranks fit the source's tokens: arrays are placed by these.
  Status check_possible(int source, int expert) const;

  const int world_;
  const int64_t capacity_;
  const bool fixed_;
  const int64_t top_k_;
};

}  // namespace nvfp4_moe::internal
