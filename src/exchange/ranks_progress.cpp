#include "exchange/ranks_progress.h"

#include <string>

namespace nvfp4_moe {

RanksProgress::RanksProgress(const ProgressFn& progress, int ranks, int first_rank)
    : progress_(progress),
      first_rank_(first_rank),
      ranks_(static_cast<size_t>(ranks)),
      start_(std::chrono::steady_clock::now()) {}

ProgressFn RanksProgress::of_rank(int index) {
  if (!progress_) return {};
  return [this, index](const Progress& mine) {
    const std::lock_guard lock(mutex_);
    ranks_[static_cast<size_t>(index)] = {mine.done, mine.total, mine.done_bytes, mine.total_bytes};
    Progress all;
    for (const Part& part : ranks_) {
      all.done += part.done;
      all.total += part.total;
      all.done_bytes += part.done_bytes;
      all.total_bytes += part.total_bytes;
    }
    const std::string item = "rank " + std::to_string(first_rank_ + index) + ": " + std::string(mine.item);
    all.what = "load";
    all.item = item;
    all.elapsed_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    return progress_(all);
  };
}

}  // namespace nvfp4_moe
