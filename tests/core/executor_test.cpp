// The thread pool: every index once, ranges no longer than the grain, nested and concurrent calls,
// reuse, exceptions.
#include "core/executor.h"

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

void expect_covers(Executor& executor, int64_t count, int64_t grain) {
  std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
  std::atomic<int> bad_ranges{0};
  executor.parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    if (begin < 0 || end > count || begin >= end || end - begin > grain) {
      ++bad_ranges;
      return;
    }
    for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
  });
  EXPECT_EQ(bad_ranges, 0);
  for (int64_t i = 0; i < count; ++i)
    ASSERT_EQ(hits[static_cast<size_t>(i)], 1) << i << " of " << count;
}

class ExecutorTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, ExecutorTest, testing::Values(1, 2, 7));

TEST_P(ExecutorTest, CoversEveryIndexOnce) {
  const auto pool = make_thread_pool(GetParam());
  EXPECT_EQ(pool->threads(), GetParam());
  for (const int64_t count : {0, 1, 2, 7, 64, 1000}) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // longer than the workers spin
    for (const int64_t grain : {1, 3, 64, 5000}) expect_covers(*pool, count, grain);
  }
}

TEST_P(ExecutorTest, NestedCallRunsOnTheSameThread) {
  const auto pool = make_thread_pool(GetParam());
  std::atomic<int64_t> inner{0};
  std::atomic<int> strayed{0};
  pool->parallel_for(20, 1, [&](int64_t, int64_t) {
    const auto self = std::this_thread::get_id();
    pool->parallel_for(30, 4, [&](int64_t begin, int64_t end) {
      inner += end - begin;
      strayed += std::this_thread::get_id() != self;
    });
  });
  EXPECT_EQ(inner, 600);
  EXPECT_EQ(strayed, 0);
  expect_covers(*pool, 100, 1);  // and the outer call left the pool usable
}

TEST_P(ExecutorTest, ManyCallsInARowFromSeveralThreads) {
  const auto pool = make_thread_pool(GetParam());
  std::vector<std::thread> callers;
  std::atomic<int64_t> sum{0};
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int call = 0; call < 500; ++call)
        pool->parallel_for(50, 3, [&](int64_t begin, int64_t end) { sum += end - begin; });
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 500 * 50);
}

// If any thread that computes a range throws, the exception leaves the call once no body runs, and
// the pool stays usable.
TEST_P(ExecutorTest, WhatABodyThrowsComesOutOnceAllHaveStopped) {
  const auto pool = make_thread_pool(GetParam());
  for (int call = 0; call < 200; ++call) {
    std::atomic<int> running{0}, begun{0};
    int seen = -1;
    try {
      pool->parallel_for(1000, 1, [&](int64_t begin, int64_t) {
        ++begun;
        ++running;
        std::this_thread::yield();
        --running;
        if (begin % 8 == call % 8) throw std::runtime_error("range " + std::to_string(begin));
      });
      ADD_FAILURE() << "nothing came out";
    } catch (const std::runtime_error& error) {
      seen = running;
      EXPECT_EQ(std::string(error.what()).rfind("range ", 0), 0u);
    }
    EXPECT_EQ(seen, 0);
    EXPECT_LT(begun, 1000);
  }
  expect_covers(*pool, 100, 1);
}

TEST(Executor, UsesItsThreadsAndTheCaller) {
  const auto pool = make_thread_pool(2);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::atomic<int> arrived{0};
  // Two ranges that wait for each other can only end if two threads run them; the caller is one of
  // them.
  pool->parallel_for(2, 1, [&](int64_t, int64_t) {
    {
      const std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
    }
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen.contains(std::this_thread::get_id()));
}

TEST(Executor, SerialRunsOnTheCallerInOrder) {
  std::vector<int64_t> begins;
  serial_executor().parallel_for(10, 4, [&](int64_t begin, int64_t) { begins.push_back(begin); });
  EXPECT_EQ(begins, (std::vector<int64_t>{0, 4, 8}));
  EXPECT_EQ(serial_executor().threads(), 1);
  EXPECT_EQ(make_thread_pool(0)->threads(), make_thread_pool(-3)->threads());
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
