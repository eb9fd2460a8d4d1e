// A process's ranks of an exchange: if one fails, all end; and the observer's view.
#include "exchange/local_ranks.h"

#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange/ranks.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(LocalRanks, ARankThatFailsOrThrowsEndsTheOthers) {
  for (const bool throws : {false, true}) {
    const auto ranks = must(LocalRanks::threads(3, kLong));
    const double seconds = seconds_of([&] {
      const Status status = ranks->each([&](int index) -> Status {
        if (index == 1 && throws) throw std::runtime_error("out of luck");
        if (index == 1) return bad_input("out of luck");
        return ranks->exchange(index)->barrier();
      });
      EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 1: "), HasSubstr("out of luck")));
    });
    EXPECT_LT(seconds, 5);
  }
}

TEST(Observer, SeesEachTransferWithTheBytesForOthers) {
  const auto ranks = must(LocalRanks::threads(3, kLong));
  std::vector<std::string> seen[3];
  EXPECT_OK(ranks->each([&](int index) -> Status {
    Exchange& exchange = *ranks->exchange(index);
    EXPECT_EQ(exchange.rank(), index);
    exchange.set_observer([&seen, index](const Transfer& transfer) {
      EXPECT_GE(transfer.us, 0);
      seen[index].push_back(std::string(transfer.what) + " " + std::to_string(transfer.sent_bytes));
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
    EXPECT_THAT(of_rank, ElementsAre("all_gather 16", "all_reduce 8", "all_reduce 8"));
}

TEST(RanksProgress, AddsTheRanksUpAndNamesWhoSaidSo) {
  std::vector<std::string> lines;
  const ProgressFn print = [&](const Progress& progress) {
    lines.push_back(std::string(progress.what) + " " + std::to_string(progress.done) + "/" +
                    std::to_string(progress.total) + " " + std::string(progress.item));
    return lines.size() < 3;
  };
  const auto step = [](int64_t done, std::string_view item) {
    return Progress{.item = item, .done = done, .total = 8};
  };
  const auto ranks = must(LocalRanks::threads(2, kLong));
  RanksProgress progress(*ranks, print);
  EXPECT_TRUE(progress.of_rank(0)(step(1, "expert 3")));
  EXPECT_TRUE(progress.of_rank(1)(step(2, "expert 7")));
  EXPECT_FALSE(progress.of_rank(0)(step(2, "expert 4")));
  EXPECT_THAT(lines, ElementsAre("load 1/8 rank 0: expert 3", "load 3/16 rank 1: expert 7",
                                 "load 4/16 rank 0: expert 4"));
  const ProgressFn nobody;
  EXPECT_TRUE(RanksProgress(*ranks, nobody).of_rank(0)(step(1, "expert 3")));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
