#include "cli/bench/all_threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace nvfp4_moe::internal::cli {

double time_on_all_threads(Executor& executor, const std::function<void(int64_t thread)>& body) {
  using Clock = std::chrono::steady_clock;
  const int64_t threads = executor.threads();
  std::atomic<int64_t> arrived{0};
  std::vector<Clock::time_point> begins(static_cast<size_t>(threads)),
      ends(static_cast<size_t>(threads));
  // A waiting range occupies its thread, so every other range gets another thread.
  executor.parallel_for(threads, 1, [&](int64_t thread, int64_t) {
    arrived.fetch_add(1);
    while (arrived.load() < threads) std::this_thread::yield();
    const auto at = static_cast<size_t>(thread);
    begins[at] = Clock::now();
    body(thread);
    ends[at] = Clock::now();
  });
  const Clock::time_point begin = *std::min_element(begins.begin(), begins.end());
  return std::chrono::duration<double>(*std::max_element(ends.begin(), ends.end()) - begin).count();
}

}  // namespace nvfp4_moe::internal::cli
