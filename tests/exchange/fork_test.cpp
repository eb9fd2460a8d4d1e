// An exchange and a watch in a forked child: nothing there is said in the rank's name, and nothing waits for what is not
// there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exchange/ranks.h"
#include "exchange/watch.h"
#include "support/forked_child.h"

namespace nvfp4_moe {
namespace {

using test::in_forked_child;
using test::kLong;
using test::on_threads;
using test::Over;

constexpr int kWorld = 2;

Result<std::unique_ptr<Exchange>> connect(Over over, ThreadGroup& group, int port, int rank) {
  return over == Over::kTcp ? connect_tcp("127.0.0.1", port, rank, kWorld, kLong) : group.join(rank, kWorld, kLong);
}

// The number of the first call that a child is not refused, as it should be; 0: none.
int first_that_is_not_refused(Exchange& exchange) {
  const int64_t one = 1, bytes[kWorld] = {8, 8};
  int64_t to[kWorld] = {}, from[kWorld] = {};
  float value = 0;
  int call = 0;
  for (const Status& status :
       {exchange.look(), exchange.barrier(), exchange.agree({}), exchange.agree(Status(Code::kIo, "mine")),
        exchange.all_gather(&one, sizeof(one), to), exchange.all_reduce(&value, 1, DType::kF32),
        exchange.all_to_all_v(from, bytes, to, bytes), exchange.check_same("config", {{"top_k", "8"}})}) {
    ++call;
    if (status.code() != Code::kUnsupported || status.message().find("forked") == std::string::npos) return call;
  }
  return 0;
}

// Dropped in the child whole, as a host's exit does it: the other rank's exchange goes on.
ATTACK_TEST(kForks, ForkedExchange, RefusesEveryCallAndSaysNothingInItsParentsName) {
  for (const Over over : {Over::kThreads, Over::kTcp}) {
    SCOPED_TRACE(name_of(over));
    const auto group = ThreadGroup::make(kWorld);
    ASSERT_OK(group);
    const int port = test::free_port();
    std::vector<std::unique_ptr<Exchange>> ranks(kWorld);
    on_threads(kWorld, [&](int rank) {
      auto exchange = connect(over, **group, port, rank);
      ASSERT_OK(exchange);
      ranks[static_cast<size_t>(rank)] = std::move(*exchange);
    });
    EXPECT_EQ(in_forked_child([&] {
                if (const int call = first_that_is_not_refused(*ranks[0]); call != 0) return call;
                ranks[0]->abort(Status(Code::kIo, "of a child"));
                ranks.clear();
                return 0;
              }),
              0);
    for (const auto& exchange : ranks) EXPECT_OK(exchange->look());
    on_threads(kWorld, [&](int rank) {
      Exchange& exchange = *ranks[static_cast<size_t>(rank)];
      int64_t mine = rank + 5, all[kWorld] = {};
      EXPECT_OK(exchange.all_gather(&mine, sizeof(mine), all));
      EXPECT_EQ(all[0] + all[1], 11);
    });
  }
}

// The other rank hears of the parent's end, which the child's copy of the connection does not hide once it is dropped.
ATTACK_TEST(kForks, ForkedExchange, AChildGivesItsCopyOfTheConnectionsBack) {
  const int port = test::free_port();
  std::vector<std::unique_ptr<Exchange>> ranks(kWorld);
  on_threads(kWorld, [&](int rank) {
    auto exchange = connect_tcp("127.0.0.1", port, rank, kWorld, kLong);
    ASSERT_OK(exchange);
    ranks[static_cast<size_t>(rank)] = std::move(*exchange);
  });
  int dropped[2] = {-1, -1}, heard[2] = {-1, -1};  // pipes: to the parent, to the child
  ASSERT_EQ(::pipe(dropped), 0);
  ASSERT_EQ(::pipe(heard), 0);
  std::thread parent([&] {
    char word = 0;
    EXPECT_EQ(::read(dropped[0], &word, 1), 1);
    ranks[0].reset();
    const Deadline deadline(Timeout{5000});
    while (ranks[1]->look().ok() && !deadline.passed()) std::this_thread::sleep_for(Timeout{5});
    EXPECT_EQ(ranks[1]->look().message(), "exchange: expected rank 0, got none: it has left");
    EXPECT_EQ(::write(heard[1], &word, 1), 1);
  });
  // The child is there until the parent has heard.
  EXPECT_EQ(in_forked_child([&] {
              for (auto& exchange : ranks) exchange.reset();
              char word = 1;
              return ::write(dropped[1], &word, 1) == 1 && ::read(heard[0], &word, 1) == 1 ? 0 : 1;
            }),
            0);
  parent.join();
  for (const int end : {dropped[0], dropped[1], heard[0], heard[1]}) ::close(end);
}

// The child forks while the watch waits, looks, or holds its mutex.
ATTACK_TEST(kForks, ForkedExchange, AWatchEndsWithoutItsThread) {
  const auto group = ThreadGroup::make(1);
  ASSERT_OK(group);
  const std::unique_ptr<Exchange> exchange = std::move(*(*group)->join(0, 1, kLong));
  const auto watched = [](std::atomic<int>& looks, Timeout each) {
    return Watch::Watched{[&looks, each]() -> Status {
                            ++looks;
                            std::this_thread::sleep_for(each);
                            return {};
                          },
                          [](const Status&) {}};
  };
  for (const Timeout each : {Timeout{0}, Timeout{300}}) {
    std::atomic<int> looks{0};
    auto watch = std::make_unique<Watch>(*exchange, watched(looks, each));
    while (looks == 0) std::this_thread::yield();
    EXPECT_EQ(in_forked_child([&] {
                {
                  const Watch::Lock lock = watch->lock();
                  if (!watch->failure().ok()) return 1;
                }
                watch->end();
                watch.reset();
                return 0;
              }),
              0);
    const int before = looks;
    while (looks == before) std::this_thread::yield();  // the parent's goes on
  }
}

}  // namespace
}  // namespace nvfp4_moe
