// Forked children: pools, mutexes that other threads held, and the number that distinguishes a
// child from its parent.
#include "core/fork.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "core/executor.h"
#include "support/forked_child.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

int64_t sum_of(Executor& executor, int64_t count) {
  std::atomic<int64_t> sum{0};
  executor.parallel_for(count, 1, [&](int64_t begin, int64_t) { sum += begin; });
  return sum;
}

int locks(ForkMutex& mutex) {
  const std::lock_guard lock(mutex);
  return 0;
}

ATTACK_TEST(kForks, Fork, ThePoolOfAParentThatIsBusyRunsInTheChild) {
  auto pool = make_thread_pool(4);
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i)
    callers.emplace_back([&] {
      while (!stop) sum_of(*pool, 64);
    });
  int wrong = 0;
  for (int fork = 0; fork < 40; ++fork)
    wrong += in_forked_child([&] {
               if (sum_of(*pool, 100) != 4950 || pool->threads() != 1) return 1;
               pool.reset();
               if (kThreadSanitizer) return 0;  // refuses threads in a forked child
               const auto own = make_thread_pool(3);
               return sum_of(*own, 100) == 4950 && own->threads() == 3 ? 0 : 2;
             }) != 0;
  stop = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(sum_of(*pool, 100), 4950);  // the parent's is unchanged
}

ATTACK_TEST(kForks, Fork, TheNumberGrowsFromParentToChild) {
  const uint32_t here = fork_count();
  EXPECT_EQ(in_forked_child([&] {
              if (fork_count() != here + 1 || forking_thread() != std::this_thread::get_id())
                return 1;
              return in_forked_child([&] { return fork_count() == here + 2 ? 0 : 1; });
            }),
            0);
  EXPECT_EQ(fork_count(), here);
}

// Two numbers that are equal whenever the mutex is free.
ATTACK_TEST(kForks, Fork, WaitsForAMutexAndLeavesWhatItGuardsWhole) {
  ForkMutex mutex;
  volatile int64_t first = 0, second = 0;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    while (!stop) {
      const std::lock_guard lock(mutex);
      first = first + 1;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      second = second + 1;
    }
  });
  for (int fork = 0; fork < 20; ++fork)
    EXPECT_EQ(in_forked_child([&] {
                const std::lock_guard lock(mutex);
                return first == second ? 0 : 1;
              }),
              0);
  stop = true;
  writer.join();
}

ATTACK_TEST(kForks, Fork, WhatTheForkingThreadHoldsItHoldsInTheChildToo) {
  for (const auto at_fork : {ForkMutex::AtFork::kWaitedFor, ForkMutex::AtFork::kAbandoned}) {
    ForkMutex mutex(at_fork);
    mutex.lock();
    EXPECT_EQ(in_forked_child([&] {
                mutex.unlock();
                return locks(mutex);
              }),
              0);
    mutex.unlock();
    locks(mutex);
  }
}

ATTACK_TEST(kForks, Fork, GoesAroundAMutexThatMayBeHeldForLong) {
  ForkMutex mutex(ForkMutex::AtFork::kAbandoned);
  std::atomic<bool> held{false}, let_go{false};
  std::thread holder([&] {
    const std::lock_guard lock(mutex);
    held = true;
    while (!let_go) std::this_thread::yield();
  });
  while (!held) std::this_thread::yield();
  EXPECT_EQ(in_forked_child([&] { return locks(mutex); }), 0);
  let_go = true;
  holder.join();
}

// Threads that hold one mutex while they create and drop others, which locks the list that fork()
// walks.
ATTACK_TEST(kForks, Fork, EndsWhileMutexesComeAndGo) {
  ForkMutex outer;
  std::atomic<bool> stop{false};
  std::vector<std::thread> makers;
  for (int i = 0; i < 2; ++i)
    makers.emplace_back([&] {
      while (!stop) {
        const std::lock_guard lock(outer);
        ForkMutex inner;
        const std::lock_guard both(inner);
      }
    });
  for (int fork = 0; fork < 20; ++fork) EXPECT_EQ(in_forked_child([&] { return locks(outer); }), 0);
  stop = true;
  for (std::thread& maker : makers) maker.join();
}

ATTACK_TEST(kForks, InEveryChild, ActsInChildrenAloneAndNoLongerThanItIsThere) {
  int acts = 0;
  const InEveryChild::Act act = [](void* of) { ++*static_cast<int*>(of); };
  {
    const InEveryChild first(act, &acts);
    const InEveryChild second(act, &acts);
    EXPECT_EQ(in_forked_child([&] { return acts; }), 2);
    EXPECT_EQ(acts, 0);
  }
  EXPECT_EQ(in_forked_child([&] { return acts; }), 0);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
