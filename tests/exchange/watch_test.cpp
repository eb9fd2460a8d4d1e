// The thread that watches a device: when it polls, what a failure ends, and which ranks are
// informed.
#include "exchange/watch.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "exchange/ranks.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// A watch over a device with a state that the test sets. Stores the polls and the failures.
struct Watching {
  explicit Watching(Exchange& exchange)
      : watch(exchange, {[this] {
                           ++polls;
                           return seen;
                         },
                         [this](const Status& why) { ended.push_back(why.message()); }}) {}

  void sees(const Status& status) {
    const Watch::Lock lock = watch.lock();
    seen = status;
  }
  Status state() {
    const Watch::Lock lock = watch.lock();
    return watch.failure();
  }
  Status state_once_failed() {
    comes_true([this] { return !state().ok(); });
    return state();
  }
  void wait_for_polls(int more) {
    const int until = polls + more;
    EXPECT_TRUE(comes_true([&] { return polls >= until; }));
  }

  std::atomic<int> polls{0};
  Status seen;                     // guarded by the watch
  std::vector<std::string> ended;  // guarded by the watch
  Watch watch;                     // last: it reads the others
};

// Dropping a rank's link does not wait for the next poll.
TEST(Watch, PollsUntilItsEndAndNoLonger) {
  on_ranks(Over::kCallbacks, 2, kLong, [](Exchange& exchange) {
    double shortest = 1;  // of several: a busy machine is slow to wake a thread
    for (int i = 0; i < 10; ++i) {
      Watching device(exchange);
      device.wait_for_polls(i == 0 ? 3 : 1);
      EXPECT_OK(device.state());
      shortest = std::min(shortest, seconds_of([&] { device.watch.end(); }));
      const int polls = device.polls;
      device.sees(Status(Code::kIo, "too late"));
      if (i == 0) std::this_thread::sleep_for(3 * Watch::kInterval);
      EXPECT_EQ(device.polls, polls);
      EXPECT_OK(device.state());
      EXPECT_THAT(device.ended, IsEmpty());
    }
    EXPECT_LT(shortest, std::chrono::duration<double>(Watch::kInterval).count() / 2);
    ASSERT_OK(exchange.barrier());
  });
}

// The first failure is never replaced, and a device that has failed is no longer polled.
TEST(Watch, TheFirstFailureStays) {
  on_ranks(Over::kThreads, 2, kLong, [](Exchange& exchange) {
    Watching device(exchange);
    ASSERT_OK(exchange.barrier());
    if (exchange.rank() == 0) {
      {
        const Watch::Lock lock = device.watch.lock();
        EXPECT_OK(device.watch.fail({}));
        EXPECT_THAT(device.ended, IsEmpty());
        device.seen = Status(Code::kIo, "third");
        EXPECT_EQ(device.watch.fail(Status(Code::kUnsupported, "first")).message(), "first");
        EXPECT_EQ(device.watch.fail(Status(Code::kIo, "second")).message(), "first");
      }
      const int polls = device.polls;
      std::this_thread::sleep_for(3 * Watch::kInterval);
      EXPECT_EQ(device.polls, polls);
      EXPECT_OK(exchange.poll());  // fail affects this rank only
      Watch::Lock lock = device.watch.lock();
      EXPECT_EQ(device.watch.fail_all(lock, Status(Code::kIo, "fourth")).message(), "first");
      EXPECT_FALSE(lock.owns_lock());
      EXPECT_EQ(device.state().code(), Code::kUnsupported);
      EXPECT_THAT(device.ended, ElementsAre("first"));
    }
    EXPECT_EQ(exchange.rank() == 0 ? "rank 0: first" : device.state_once_failed().message(),
              "rank 0: first");
  });
}

// The tests of NCCL and of peers have ranks that leave.
TEST(Watch, WhatTheDeviceSaysEndsAllRanks) {
  std::atomic<int> received{0};
  on_ranks(Over::kCallbacks, 3, kLong, [&](Exchange& exchange) {
    Watching device(exchange);
    ASSERT_OK(exchange.barrier());
    if (exchange.rank() == 1) device.sees(Status(Code::kIo, "late"));
    const Status state = device.state_once_failed();
    EXPECT_THAT(state, Refused(Code::kIo, exchange.rank() == 1 ? "late" : "rank 1: late"));
    for (++received; received < 3;) std::this_thread::sleep_for(Timeout{5});
    EXPECT_EQ(exchange.barrier().message(), "rank 1: late");
    const Watch::Lock lock = device.watch.lock();
    EXPECT_THAT(device.ended, ElementsAre(state.message()));
  });
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
