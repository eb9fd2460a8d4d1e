// A process's ranks of an exchange: if one fails, all end; and the observer's view.
#include "exchange/local_ranks.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange/ranks.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(LocalRanks, CallEachRankOnAThreadOfItsOwn) {
  const auto ranks = must(LocalRanks::threads(3, kLong));
  EXPECT_EQ(ranks->world(), 3);
  EXPECT_EQ(ranks->here(), 3);
  EXPECT_TRUE(ranks->has_first());
  std::atomic<int> sum{0};
  EXPECT_OK(ranks->each([&](int index) {
    sum += index + 1;
    EXPECT_EQ(ranks->exchange(index)->rank(), index);
    return ranks->exchange(index)->barrier();  // ends only if all ranks are here at once
  }));
  EXPECT_EQ(sum, 6);
}

TEST(LocalRanks, AProcessIsOneRank) {
  on_threads(2, [group = *ThreadGroup::make(2)](int rank) {
    auto exchange = must(group->join(rank, 2, kLong));
    const LocalRanks ranks = LocalRanks::process(std::move(*exchange));
    EXPECT_EQ(ranks.world(), 2);
    EXPECT_EQ(ranks.here(), 1);
    EXPECT_EQ(ranks.first_rank(), rank);
    EXPECT_EQ(ranks.has_first(), rank == 0);
    EXPECT_OK(ranks.each([&](int index) { return ranks.exchange(index)->barrier(); }));
  });
}

TEST(LocalRanks, ARankThatFailsOrThrowsEndsTheOthers) {
  for (const bool throws : {false, true}) {
    const auto ranks = must(LocalRanks::threads(3, kLong));
    const double seconds = seconds_of([&] {
      const Status status = ranks->each([&](int index) -> Status {
        if (index == 1 && throws) throw std::runtime_error("out of luck");
        if (index == 1) return bad_input("out of luck");
        return ranks->exchange(index)->barrier();
      });
      EXPECT_FALSE(status.ok());
      EXPECT_THAT(status.message(), HasSubstr("rank 1: ")) << status.message();
      EXPECT_THAT(status.message(), HasSubstr("out of luck"));
    });
    EXPECT_LT(seconds, 5);
  }
}

TEST(Observer, SeesEachTransferWithTheBytesForOthers) {
  const auto ranks = must(LocalRanks::threads(3, kLong));
  std::vector<std::vector<std::string>> seen(3);
  EXPECT_OK(ranks->each([&](int index) -> Status {
    Exchange& exchange = *ranks->exchange(index);
    exchange.set_observer([&seen, index](const Transfer& transfer) {
      EXPECT_GE(transfer.us, 0);
      seen[static_cast<size_t>(index)].push_back(std::string(transfer.what) + " " +
                                                 std::to_string(transfer.sent_bytes));
    });
    const int64_t mine = index;
    int64_t all[3];
    NVFP4_MOE_TRY(exchange.all_gather(&mine, sizeof(mine), all));
    float sum[3] = {1, 2, 3};
    NVFP4_MOE_TRY(exchange.all_reduce(sum, 3));
    exchange.set_observer({});
    return exchange.barrier();
  }));
  for (const auto& of_rank : seen)
    EXPECT_EQ(of_rank, (std::vector<std::string>{"all_gather 16", "all_reduce 8", "all_reduce 8"}));
}

// Progress reports as texts, from any thread.
class Lines {
 public:
  ProgressFn function() {
    return [this](const Progress& progress) {
      const std::lock_guard lock(mutex_);
      lines_.push_back(std::string(progress.what) + " " + std::to_string(progress.done) + "/" +
                       std::to_string(progress.total) + " " + std::string(progress.item));
      return goes_on_;
    };
  }
  void stop() { goes_on_ = false; }
  std::vector<std::string> all() {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
  bool goes_on_ = true;
};

Progress step(int64_t done, std::string_view item) {
  Progress progress;
  progress.done = done;
  progress.total = 8;
  progress.item = item;
  return progress;
}

TEST(RanksProgress, AddsTheRanksUpAndNamesWhoSaidSo) {
  Lines lines;
  const ProgressFn print = lines.function();
  const auto ranks = must(LocalRanks::threads(2, kLong));
  RanksProgress progress(*ranks, print);
  EXPECT_TRUE(progress.of_rank(0)(step(1, "expert 3")));
  EXPECT_TRUE(progress.of_rank(1)(step(2, "expert 7")));
  lines.stop();
  EXPECT_FALSE(progress.of_rank(0)(step(2, "expert 4")));
  EXPECT_EQ(lines.all(),
            (std::vector<std::string>{"load 1/8 rank 0: expert 3", "load 3/16 rank 1: expert 7",
                                      "load 4/16 rank 0: expert 4"}));
  const ProgressFn nobody;
  RanksProgress quiet(*ranks, nobody);
  EXPECT_TRUE(quiet.of_rank(0)(step(1, "expert 3")));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
