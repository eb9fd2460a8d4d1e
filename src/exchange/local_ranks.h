// The ranks of an exchange in this process: either one, or all ranks of a world, each on a thread.
// Lets tools run the same steps in both cases.
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
  // All ranks of a world of that size, connected as threads.
  static Result<LocalRanks> threads(int world, Timeout timeout = kExchangeTimeout);
  // This process is one rank.
  static LocalRanks process(std::unique_ptr<Exchange> exchange);

  int world() const { return exchanges_.front()->world(); }
  int here() const { return static_cast<int>(exchanges_.size()); }
  // Whether rank 0, which reports for all, is in this process.
  bool has_first() const { return first_rank() == 0; }
  // The lowest rank in this process.
  int first_rank() const { return exchanges_.front()->rank(); }
  const std::shared_ptr<Exchange>& exchange(int index) const {
    return exchanges_[static_cast<size_t>(index)];
  }

  // Calls body(index) for each rank in this process, on separate threads if there are several, and
  // waits for all. A rank whose body fails or throws aborts its exchange, so that no other rank
  // waits for it. Returns the failure of the lowest rank.
  Status each(const std::function<Status(int index)>& body) const;

 private:
  std::vector<std::shared_ptr<Exchange>> exchanges_;  // by rank
};

// Merges the load progress of all ranks of this process into one report. Other processes report
// their own.
class RanksProgress {
 public:
  // progress may be empty; it must outlive this object.
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
