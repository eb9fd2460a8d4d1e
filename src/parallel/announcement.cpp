// A header of fixed size and the rank's counts, gathered at once.
#include "parallel/announcement.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

namespace nvfp4_moe {

struct Announcement::Header {
  int64_t tokens = 0;
  int32_t code = 0;
  char message[500] = {};  // cut to fit, ends with 0
};

Announcement::Announcement(int world, int64_t counts)
    : bytes_(static_cast<int64_t>(sizeof(Header)) + counts * static_cast<int64_t>(sizeof(int64_t))),
      mine_(static_cast<size_t>(bytes_)),
      messages_(static_cast<size_t>(bytes_) * static_cast<size_t>(world)) {}

Status Announcement::gather(Exchange& exchange, int64_t tokens, const Status& mine, std::span<const int64_t> counts) {
  Header header;
  header.tokens = tokens;
  header.code = static_cast<int32_t>(mine.code());
  mine.message().copy(header.message, sizeof(header.message) - 1);
  std::memcpy(mine_.data(), &header, sizeof(header));
  if (!counts.empty()) std::memcpy(mine_.data() + sizeof(header), counts.data(), counts.size_bytes());
  NVFP4_MOE_TRY(exchange.all_gather(mine_.data(), bytes_, messages_.data()));
  if (std::memcmp(messages_.data() + exchange.rank() * bytes_, mine_.data(), mine_.size()) != 0)
    return io_error("announcement: expected this rank's own bytes back from the exchange, got others");
  for (int rank = 0; rank < exchange.world(); ++rank) {
    std::memcpy(&header, messages_.data() + rank * bytes_, sizeof(header));
    header.message[sizeof(header.message) - 1] = 0;
    if (header.code != 0)
      return Status(code_of_failure(header.code), header.message).in("rank " + std::to_string(rank));
    int64_t least = header.tokens;
    for (int64_t index = 0; index < std::ssize(counts); ++index) least = std::min(least, count(rank, index));
    if (least < 0)  // arrays are placed by these
      return io_error("announcement of rank " + std::to_string(rank) + ": expected counts from 0, got " +
                      std::to_string(least));
  }
  return {};
}

int64_t Announcement::tokens(int rank) const {
  Header header;
  std::memcpy(&header, messages_.data() + rank * bytes_, sizeof(header));
  return header.tokens;
}

int64_t Announcement::count(int rank, int64_t index) const {
  int64_t value = 0;
  std::memcpy(&value, messages_.data() + rank * bytes_ + sizeof(Header) + static_cast<size_t>(index) * sizeof(value),
              sizeof(value));
  return value;
}

Status all_capture_or_none(const Announcement& announcement, int world, int64_t index) {
  const bool first = announcement.count(0, index) != 0;
  for (int rank = 1; rank < world; ++rank)
    if ((announcement.count(rank, index) != 0) != first)
      return invalid_argument(
          "stream of rank " + std::to_string(rank) + ": expected one that is " +
          (first ? "captured, as on rank 0, got one that is not" : "not captured, as on rank 0, got one that is"));
  return {};
}

}  // namespace nvfp4_moe
