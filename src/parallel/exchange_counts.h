// Exchange counts, which all ranks gather before a run's data: how many tokens each rank has,
// whether it can run, and, for all_to_all, how many packets and rows each pair of ranks exchanges.
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
  // counts: the number of integers that each rank sends.
  ExchangeCounts(int world, int64_t counts)
      : mine_(static_cast<size_t>(kHeader + counts)),
        messages_(mine_.size() * static_cast<size_t>(world)) {}

  // This rank's integers, (counts). The next gather sends them.
  std::span<int64_t> own() { return std::span(mine_).subspan(kHeader); }
  // Succeeds on all ranks or fails on all. tokens, mine, captured: the tokens of this rank, why it
  // cannot run, and whether its stream is being captured. Returns the error of the lowest rank that
  // has one, kInvalidArgument if only some ranks capture their stream, and kIo if the exchange
  // fails or damages the counts. Allocates nothing itself.
  Status gather(Exchange& exchange, int64_t tokens, const Status& mine, bool captured);
  // Values of the last gather.
  int64_t tokens(int rank) const { return message(rank)[0]; }
  int64_t count(int rank, int64_t index) const { return message(rank)[kHeader + index]; }

 private:
  // Integers of a header: the number of tokens, whether the stream is captured, and the status.
  static constexpr int64_t kHeader = 64;
  const int64_t* message(int rank) const {
    return messages_.data() + mine_.size() * static_cast<size_t>(rank);
  }

  std::vector<int64_t> mine_;      // a header and the counts
  std::vector<int64_t> messages_;  // (world, size of mine_)
};

// The exchange counts of all_to_all. A message has the numbers of packets and rows that its source
// rank reports. Under a fixed capacity they follow from the capacity and that rank's tokens
// instead.
class PacketCounts : public ExchangeCounts {
 public:
  // capacity, fixed: those of Ranks. top_k: rows that a packet may have.
  PacketCounts(int world, int64_t capacity, bool fixed, int64_t top_k);

  // own() holds two integers for each rank: the tokens and the rows that this rank has for it. Also
  // fails, on all ranks, if a rank has more tokens for another than the capacity.
  Status gather(Exchange& exchange, int64_t tokens, const Status& mine, bool captured);

  // The numbers that the source rank has reported in the last gather.
  int64_t tokens_between(int source, int expert) const { return count(source, 2 * expert); }
  int64_t rows_between(int source, int expert) const { return count(source, 2 * expert + 1); }
  // The packets of the message from a source rank to an expert rank, and the rows of its answer.
  int64_t packets_between(int source, int expert) const {
    return fixed_ ? fixed_packets(tokens(source)) : tokens_between(source, expert);
  }
  int64_t rows_back_between(int source, int expert) const {
    return fixed_ ? fixed_packets(tokens(source)) * top_k_ : rows_between(source, expert);
  }
  // Packets in each message of a source rank with this many tokens, under a fixed capacity.
  int64_t fixed_packets(int64_t tokens) const { return std::min(capacity_, tokens); }

  // The most packets that a source rank with this many tokens sends in a run, that an expert rank
  // receives, and the most rows that come back to the source rank.
  int64_t sent(int64_t tokens) const {
    return fixed_ ? world_ * fixed_packets(tokens) : tokens * std::min<int64_t>(top_k_, world_);
  }
  int64_t received() const { return world_ * capacity_; }
  int64_t rows_back(int64_t tokens) const { return (fixed_ ? sent(tokens) : tokens) * top_k_; }

  int64_t capacity() const { return capacity_; }
  bool fixed() const { return fixed_; }
  // The error for `tokens` above the capacity.
  static Status too_many(int64_t tokens, int64_t source, int64_t expert, int64_t capacity);

 private:
  // Whether a pair's counts, which determine array offsets, are possible for the source's tokens.
  Status check_possible(int source, int expert) const;

  const int world_;
  const int64_t capacity_;
  const bool fixed_;
  const int64_t top_k_;
};

}  // namespace nvfp4_moe::internal
