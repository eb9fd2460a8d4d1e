// Ranks that are threads of one process: for tests, and for what runs without a second process.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

// Connects the ranks of one world. Each rank's thread joins once and drops its Exchange when done;
// the others' calls then end with a message that names it.
class ThreadGroup : public std::enable_shared_from_this<ThreadGroup> {
 public:
  static Result<std::shared_ptr<ThreadGroup>> make(int world);

  // Waits for all ranks. If one claims another world, or a rank that is taken, every rank gets that
  // failure.
  Result<std::unique_ptr<Exchange>> join(int rank, int world, Timeout timeout = kExchangeTimeout);

 private:
  class Rank;  // the transport
  explicit ThreadGroup(int world);
  Status all_to_all_v(int rank, const AllToAll& call);
  Status check_calls() const;
  void copy(int rank) const;
  void leave(int rank);
  void fail(const Status& why);
  std::vector<int> missing(const std::vector<bool>& present) const;
  Status late(const char* what, const std::vector<bool>& present, Timeout timeout) const;

  const int world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Status failure_;               // the first one; every call that has not begun to copy returns it
  std::vector<bool> joined_;     // (world)
  std::vector<bool> arrived_;    // (world) whose call stands in calls_
  std::vector<AllToAll> calls_;  // (world)
  uint64_t begun_ = 0;           // calls that all ranks have come to, and from which they copy
  uint64_t ended_ = 0;           // calls that all ranks have copied from
  int copied_ = 0;               // ranks that have, in the call that has begun
};

}  // namespace nvfp4_moe::internal
