// The ranks of an exchange that this process has: one, or all of a world, each on a thread. For
// tools that go through one list of steps either way.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/progress.h"
#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

class LocalRanks {
 public:
  // All ranks of a world of that many, connected as threads.
  static Result<LocalRanks> threads(int world, Timeout timeout = kExchangeTimeout);
  // This process is one rank.
  static LocalRanks process(std::unique_ptr<Exchange> exchange);

  int world() const { return exchanges_.front()->world(); }
  int here() const { return static_cast<int>(exchanges_.size()); }
  // Whether rank 0, which speaks for all, is one of them.
  bool has_first() const { return first_rank() == 0; }
  // The lowest of them.
  int first_rank() const { return exchanges_.front()->rank(); }
  const std::shared_ptr<Exchange>& exchange(int index) const {
    return exchanges_[static_cast<size_t>(index)];
  }

  // Calls body(index) for each of them, on a thread of its own if there are several, and waits for
  // all. A rank whose body fails or throws aborts its exchange, so that no other one waits for it;
  // the failure that comes back is the lowest rank's.
  Status each(const std::function<Status(int index)>& body) const;

 private:
  std::vector<std::shared_ptr<Exchange>> exchanges_;  // by rank
};

// One progress report of what the ranks of this process load at once. Ranks of other processes
// report their own.
class RanksProgress {
 public:
  // progress may be empty, and outlives this.
  RanksProgress(const LocalRanks& ranks, const ProgressFn& progress)
      : progress_(progress),
        first_rank_(ranks.first_rank()),
        ranks_(static_cast<size_t>(ranks.here())) {}
  // The progress function of rank ranks.first_rank() + index, called on that rank's thread.
  ProgressFn of_rank(int index);

 private:
  const ProgressFn& progress_;
  const int first_rank_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::vector<Progress> ranks_;  // guarded by mutex_
};

}  // namespace nvfp4_moe::internal
