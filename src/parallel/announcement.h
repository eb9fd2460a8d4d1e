// Announcement: what each rank says to all before a run's data goes, so that a rank that cannot run ends the run on all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "exchange/exchange.h"

namespace nvfp4_moe {

class Announcement {
 public:
  // counts: how many numbers each rank says.
  Announcement(int world, int64_t counts);

  // Ok on every rank or on none: with the failure of the lowest rank that has one. Allocates nothing of its own.
  Status gather(Exchange& exchange, int64_t tokens, const Status& mine, std::span<const int64_t> counts);
  // Of the last gather.
  int64_t tokens(int rank) const;
  int64_t count(int rank, int64_t index) const;

 private:
  struct Header;
  int64_t bytes_;                    // of one rank's message: a header and its counts
  std::vector<std::byte> mine_;      // (bytes_)
  std::vector<std::byte> messages_;  // (world, bytes_)
};

// Every rank has counted at `index` whether its stream is captured. kInvalidArgument, on every rank alike, where they differ:
// a graph is replayed by all or by none.
Status all_capture_or_none(const Announcement& announcement, int world, int64_t index);

}  // namespace nvfp4_moe
