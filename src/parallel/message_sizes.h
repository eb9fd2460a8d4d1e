// MessageSizes: how many records and rows go between each two ranks in a run of all_to_all, and room for how many a rank
// has. Either what the ranks have announced, or, under a fixed capacity, what the capacity and a home's own number of tokens
// allow: known to all ranks, and the same for any routing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "exchange/exchange.h"
#include "parallel/announcement.h"

namespace nvfp4_moe {

class MessageSizes {
 public:
  // capacity: tokens from one rank to another, at most; fixed: every message is as long as such a number can make it. more:
  // numbers that a rank announces besides.
  MessageSizes(int world, int64_t capacity, bool fixed, int64_t top_k, int64_t more = 0);

  // counts: for each rank the tokens and the rows that this one has for it, then what there is more. Ok on all ranks or
  // on none; a rank that has more than the capacity for another is named.
  Status announce(Exchange& exchange, int64_t tokens, const Status& mine, std::span<const int64_t> counts);
  // What a rank announces besides begins at this count.
  int64_t first_more() const { return 2 * int64_t{world_}; }
  const Announcement& announcement() const { return announcement_; }

  // As announced.
  int64_t tokens_between(int home, int owner) const { return announcement_.count(home, 2 * owner); }
  int64_t rows_between(int home, int owner) const { return announcement_.count(home, 2 * owner + 1); }
  // What a message holds, there and back.
  int64_t records_between(int home, int owner) const {
    return fixed_ ? fixed_records(announcement_.tokens(home)) : tokens_between(home, owner);
  }
  int64_t rows_back_between(int home, int owner) const {
    return fixed_ ? fixed_records(announcement_.tokens(home)) * top_k_ : rows_between(home, owner);
  }
  // Under a fixed capacity, in each message of a home that has so many tokens.
  int64_t fixed_records(int64_t tokens) const { return std::min(capacity_, tokens); }

  // What a run of so many tokens at home needs room for, at most.
  int64_t sent(int64_t tokens) const {
    return fixed_ ? world_ * fixed_records(tokens) : tokens * std::min<int64_t>(top_k_, world_);
  }
  int64_t received() const { return world_ * capacity_; }
  int64_t rows_back(int64_t tokens) const { return (fixed_ ? sent(tokens) : tokens) * top_k_; }

  int64_t capacity() const { return capacity_; }
  bool fixed() const { return fixed_; }
  // That `tokens` are more than the capacity.
  static Status too_many(int64_t tokens, int64_t home, int64_t owner, int64_t capacity);

 private:
  // That what a rank says of another fits its tokens: arrays are placed by these.
  Status check_possible(int home, int owner) const;

  const int world_;
  const int64_t capacity_;
  const bool fixed_;
  const int64_t top_k_;
  Announcement announcement_;
};

}  // namespace nvfp4_moe
