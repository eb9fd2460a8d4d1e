// Ranks as threads of one process, for tests and for programs without a second process.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

// Connects the ranks of one world. Each rank's thread joins once and drops its Exchange when done.
// Later calls of the others then fail with a message that names the rank.
class ThreadGroup : public std::enable_shared_from_this<ThreadGroup> {
 public:
  static Result<std::shared_ptr<ThreadGroup>> make(int world);

  // Waits for all ranks. If one passes another world size, or a rank that is already taken, every
  // rank gets that failure.
  Result<std::unique_ptr<Exchange>> join(int rank, int world, Timeout timeout = kExchangeTimeout);

 private:
  class Rank;  // the transport
  explicit ThreadGroup(int world);
  Status all_to_all_v(int rank, const AllToAll& call);
  Status check_calls() const;
  void copy(int rank) const;
  void leave(int rank);
  void fail(const Status& why);
  Status late(const char* what, const std::vector<bool>& present, Timeout timeout) const;

  const int world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Status failure_;  // the first failure; every call that has not started to copy returns it
  std::vector<bool> joined_;     // (world)
  std::vector<bool> arrived_;    // (world) ranks whose call is in calls_
  std::vector<AllToAll> calls_;  // (world)
  uint64_t begun_ = 0;  // number of calls in which all ranks have arrived and started to copy
  uint64_t ended_ = 0;  // number of calls in which all ranks have copied
  int copied_ = 0;      // ranks that have copied in the current call
};

}  // namespace nvfp4_moe::internal
