#include "exchange/local_ranks.h"

#include <system_error>
#include <thread>
#include <utility>

#include "exchange/threads.h"

namespace nvfp4_moe::internal {
namespace {

using Body = std::function<Status(int index)>;

// An exception becomes its Status.
Status guarded(const Body& body, int index) {
  try {
    return body(index);
  } catch (...) {
    return caught_exception();
  }
}

// Calls body(index) for index = 0 .. count - 1, each on a thread.
std::vector<Status> on_threads(int count, const Body& body) {
  std::vector<Status> statuses(static_cast<size_t>(count));
  const auto run = [&](int index) { statuses[static_cast<size_t>(index)] = guarded(body, index); };
  std::vector<std::thread> threads;
  for (int index = 1; index < count; ++index) {
    try {
      threads.emplace_back(run, index);
    } catch (const std::system_error&) {  // the ranks that have a thread end by their timeout
      statuses[static_cast<size_t>(index)] =
          Status(Code::kOutOfMemory, "threads: expected " + std::to_string(count) +
                                         ", one for each rank, got " + std::to_string(index));
      break;
    }
  }
  run(0);
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

}  // namespace

Result<LocalRanks> LocalRanks::threads(int world, Timeout timeout) {
  NVFP4_MOE_ASSIGN(const auto group, ThreadGroup::make(world));
  LocalRanks ranks;
  ranks.exchanges_.resize(static_cast<size_t>(world));
  const std::vector<Status> joined = on_threads(world, [&](int rank) -> Status {
    NVFP4_MOE_ASSIGN(ranks.exchanges_[static_cast<size_t>(rank)],
                     group->join(rank, world, timeout));
    return {};
  });
  for (const Status& status : joined) NVFP4_MOE_TRY(status);
  return ranks;
}

LocalRanks LocalRanks::process(std::unique_ptr<Exchange> exchange) {
  LocalRanks ranks;
  ranks.exchanges_.push_back(std::move(exchange));
  return ranks;
}

Status LocalRanks::each(const std::function<Status(int index)>& body) const {
  const std::vector<Status> statuses = on_threads(here(), [&](int index) {
    const Status mine = guarded(body, index);
    if (!mine.ok()) exchange(index)->abort(mine);
    return mine;
  });
  for (const Status& status : statuses) NVFP4_MOE_TRY(status);
  return {};
}

ProgressFn RanksProgress::of_rank(int index) {
  return [this, index](const Progress& mine) {
    const std::lock_guard lock(mutex_);
    Progress& kept = ranks_[static_cast<size_t>(index)];
    kept = mine;
    kept.what = kept.item = {};  // they are only valid during this call
    if (!progress_) return true;
    const std::string item =
        "rank " + std::to_string(first_rank_ + index) + ": " + std::string(mine.item);
    Progress all;
    for (const Progress& rank : ranks_) {
      all.done += rank.done;
      all.total += rank.total;
      all.done_bytes += rank.done_bytes;
      all.total_bytes += rank.total_bytes;
    }
    all.what = "load";
    all.item = item;
    all.elapsed_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    return progress_(all);
  };
}

}  // namespace nvfp4_moe::internal
