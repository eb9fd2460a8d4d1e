// A header of fixed size, then the rank's counts: one exchange gathers both.
#include "parallel/exchange_counts.h"

#include <cstring>
#include <iterator>
#include <string>

namespace nvfp4_moe::internal {

struct ExchangeCounts::Header {
  int64_t tokens = 0;
  int32_t code = 0;
  int32_t captured = 0;
  char message[496] = {};  // truncated to fit, ends with 0
};

ExchangeCounts::ExchangeCounts(int world, int64_t counts)
    : bytes_(static_cast<int64_t>(sizeof(Header)) + counts * static_cast<int64_t>(sizeof(int64_t))),
      mine_(static_cast<size_t>(bytes_)),
      messages_(static_cast<size_t>(bytes_) * static_cast<size_t>(world)) {}

ExchangeCounts::Header ExchangeCounts::header(int rank) const {
  Header header;
  std::memcpy(&header, messages_.data() + rank * bytes_, sizeof(header));
  header.message[sizeof(header.message) - 1] = 0;
  return header;
}

Status ExchangeCounts::gather(Exchange& exchange, int64_t tokens, const Status& mine, bool captured,
                              std::span<const int64_t> counts) {
  Header own;
  own.tokens = tokens;
  own.code = static_cast<int32_t>(mine.code());
  own.captured = captured ? 1 : 0;
  mine.message().copy(own.message, sizeof(own.message) - 1);
  std::memcpy(mine_.data(), &own, sizeof(own));
  if (!counts.empty()) std::memcpy(mine_.data() + sizeof(own), counts.data(), counts.size_bytes());
  NVFP4_MOE_TRY(exchange.all_gather(mine_.data(), bytes_, messages_.data()));
  if (std::memcmp(messages_.data() + exchange.rank() * bytes_, mine_.data(), mine_.size()) != 0)
    return io_error(
        "exchange counts: expected this rank's own bytes back from the exchange, got others");
  for (int rank = 0; rank < exchange.world(); ++rank) {
    const Header of_rank = header(rank);
    if (of_rank.code != 0)
      return Status(code_of_failure(of_rank.code), of_rank.message)
          .in("rank " + std::to_string(rank));
    int64_t least = of_rank.tokens;
    for (int64_t index = 0; index < std::ssize(counts); ++index)
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

int64_t ExchangeCounts::tokens(int rank) const { return header(rank).tokens; }

int64_t ExchangeCounts::count(int rank, int64_t index) const {
  int64_t value = 0;
  std::memcpy(&value,
              messages_.data() + rank * bytes_ + sizeof(Header) +
                  static_cast<size_t>(index) * sizeof(value),
              sizeof(value));
  return value;
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

Status PacketCounts::gather(Exchange& exchange, int64_t tokens, const Status& mine, bool captured,
                            std::span<const int64_t> counts) {
  NVFP4_MOE_TRY(ExchangeCounts::gather(exchange, tokens, mine, captured, counts));
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
