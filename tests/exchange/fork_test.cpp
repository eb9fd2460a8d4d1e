// An exchange and a watch in a forked child: the child sends nothing in the rank's name.

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exchange/ranks.h"
#include "exchange/watch.h"
#include "support/forked_child.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr int kPair = 2;

// A rank, with its host if the exchange uses callbacks.
struct ForkedRank {
  std::unique_ptr<CalledBack> called_back;
  std::unique_ptr<Exchange> own;
  Exchange& exchange() const { return called_back ? called_back->exchange() : *own; }
};

std::vector<ForkedRank> forked_ranks(Over over) {
  const auto group = must(ThreadGroup::make(kPair));
  std::vector<ForkedRank> ranks(kPair);
  on_threads(kPair, [&](int rank) {
    ForkedRank& made = ranks[static_cast<size_t>(rank)];
    if (over == Over::kThreads)
      made.own = std::move(*must((*group)->join(rank, kPair, kLong)));
    else
      made.called_back = std::move(*must(CalledBack::connect(**group, rank, kPair, kLong)));
    EXPECT_OK(made.exchange().can_poll());
  });
  return ranks;
}

// The number of the first call that a child is allowed although it must be refused; 0 if all are
// refused.
int first_that_is_not_refused(Exchange& exchange) {
  const int64_t one = 1, bytes[kPair] = {8, 8};
  int64_t to[kPair] = {}, from[kPair] = {};
  float value = 0;
  int call = 0;
  for (const Status& status :
       {exchange.poll(), exchange.barrier(), exchange.agree({}),
        exchange.agree(Status(Code::kIo, "mine")), exchange.all_gather(&one, sizeof(one), to),
        exchange.all_reduce(&value, 1), exchange.all_to_all_v(from, bytes, to, bytes),
        exchange.check_same("config", {{"top_k", "8"}})}) {
    ++call;
    if (status.code() != Code::kUnsupported || status.message().find("forked") == std::string::npos)
      return call;
  }
  return 0;
}

// Dropped entirely in the child, as when a host exits: the other rank's exchange continues.
ATTACK_TEST(kForks, ForkedExchange, RefusesEveryCallAndSaysNothingInItsParentsName) {
  for (const Over over : {Over::kThreads, Over::kCallbacks}) {
    SCOPED_TRACE(name_of(over));
    std::vector<ForkedRank> ranks = forked_ranks(over);
    EXPECT_EQ(in_forked_child([&] {
                if (const int call = first_that_is_not_refused(ranks[0].exchange()); call != 0)
                  return call;
                ranks[0].exchange().abort(Status(Code::kIo, "of a child"));
                ranks.clear();
                return 0;
              }),
              0);
    for (const ForkedRank& rank : ranks) EXPECT_OK(rank.exchange().poll());
    on_threads(kPair, [&](int rank) {
      int64_t mine = rank + 5, all[kPair] = {};
      EXPECT_OK(ranks[static_cast<size_t>(rank)].exchange().all_gather(&mine, sizeof(mine), all));
      EXPECT_EQ(all[0] + all[1], 11);
    });
  }
}

// A child's copies of the connections must not hide the parent's end from the other rank, whether
// the child drops the exchange or knows nothing of it.
ATTACK_TEST(kForks, ForkedExchange, AChildHidesNoEndOfItsParent) {
  for (const bool drops : {false, true}) {
    SCOPED_TRACE(drops);
    std::vector<ForkedRank> ranks = forked_ranks(Over::kCallbacks);
    int forked[2] = {-1, -1}, received[2] = {-1, -1};  // pipes: to the parent, to the child
    ASSERT_EQ(::pipe(forked), 0);
    ASSERT_EQ(::pipe(received), 0);
    std::thread parent([&] {
      char word = 0;
      EXPECT_EQ(::read(forked[0], &word, 1), 1);
      ranks[0] = {};
      comes_true([&] { return !ranks[1].exchange().poll().ok(); });
      EXPECT_EQ(ranks[1].exchange().poll().message(),
                "exchange: expected rank 0, got none: it has left");
      EXPECT_EQ(::write(received[1], &word, 1), 1);
    });
    // The child lives until the parent has received.
    EXPECT_EQ(in_forked_child([&] {
                if (drops) ranks.clear();
                char word = 1;
                return ::write(forked[1], &word, 1) == 1 && ::read(received[0], &word, 1) == 1 ? 0
                                                                                               : 1;
              }),
              0);
    parent.join();
    for (const int end : {forked[0], forked[1], received[0], received[1]}) ::close(end);
  }
}

// The child forks while the watch waits, polls, or holds its mutex.
ATTACK_TEST(kForks, ForkedExchange, AWatchEndsWithoutItsThread) {
  const auto group = must(ThreadGroup::make(1));
  const std::unique_ptr<Exchange> exchange = std::move(*(*group)->join(0, 1, kLong));
  const auto watched = [](std::atomic<int>& polls, Timeout each) {
    return Watch::Watched{[&polls, each]() -> Status {
                            ++polls;
                            std::this_thread::sleep_for(each);
                            return {};
                          },
                          [](const Status&) {}};
  };
  for (const Timeout each : {Timeout{0}, Timeout{300}}) {
    std::atomic<int> polls{0};
    auto watch = std::make_unique<Watch>(*exchange, watched(polls, each));
    while (polls == 0) std::this_thread::yield();
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
    const int before = polls;
    while (polls == before) std::this_thread::yield();  // the parent's continues
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
