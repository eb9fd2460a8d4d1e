// One progress report of what several ranks load at once.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/progress.h"

namespace nvfp4_moe {

class RanksProgress {
 public:
  // ranks: of this process, first_rank the lowest of them. progress may be empty, and outlives this.
  RanksProgress(const ProgressFn& progress, int ranks, int first_rank = 0);
  // What rank first_rank + index reports to, from a thread of its own; empty where there is no progress. The sums over
  // the ranks go on, and which rank did what last.
  ProgressFn of_rank(int index);

 private:
  struct Part {
    int64_t done = 0, total = 0, done_bytes = 0, total_bytes = 0;
  };
  const ProgressFn& progress_;
  const int first_rank_;
  std::mutex mutex_;
  std::vector<Part> ranks_;  // guarded by mutex_
  const std::chrono::steady_clock::time_point start_;
};

}  // namespace nvfp4_moe
