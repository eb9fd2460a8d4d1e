// A process's ranks of an exchange: how one that fails ends all, and what an observer sees.
#include "exchange/local_ranks.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange/ranks.h"
#include "exchange/ranks_progress.h"

namespace nvfp4_moe::test {
namespace {

using testing::HasSubstr;

TEST(LocalRanks, CallEachRankOnAThreadOfItsOwn) {
  const auto ranks = LocalRanks::threads(3, kLong);
  ASSERT_OK(ranks);
  EXPECT_EQ(ranks->world(), 3);
  EXPECT_EQ(ranks->here(), 3);
  EXPECT_TRUE(ranks->has_first());
  std::atomic<int> sum{0};
  EXPECT_OK(ranks->each([&](int index) {
    sum += index + 1;
    EXPECT_EQ(ranks->exchange(index)->rank(), index);
    return ranks->exchange(index)->barrier();  // ends only where all are there at once
  }));
  EXPECT_EQ(sum, 6);
}

TEST(LocalRanks, AProcessIsOneRank) {
  on_threads(2, [group = *ThreadGroup::make(2)](int rank) {
    auto exchange = group->join(rank, 2, kLong);
    ASSERT_OK(exchange);
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
    const auto ranks = LocalRanks::threads(3, kLong);
    ASSERT_OK(ranks);
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
  const auto ranks = LocalRanks::threads(3, kLong);
  ASSERT_OK(ranks);
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
    NVFP4_MOE_TRY(exchange.all_reduce(sum, 3, DType::kF32));
    exchange.set_observer({});
    return exchange.barrier();
  }));
  for (const auto& of_rank : seen)
    EXPECT_EQ(of_rank, (std::vector<std::string>{"all_gather 16", "all_reduce 8", "all_reduce 8"}));
}

// Progress reports as texts, from whatever thread.
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
  // Waits for one that has this in it.
  bool has(const std::string& part) {
    for (const auto end = std::chrono::steady_clock::now() + kLong; std::chrono::steady_clock::now() < end;) {
      const std::vector<std::string> lines = all();
      const auto holds = [&](const std::string& line) { return line.find(part) != line.npos; };
      if (std::any_of(lines.begin(), lines.end(), holds)) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
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
  const auto ranks = LocalRanks::threads(2, kLong);
  ASSERT_OK(ranks);
  const auto progress = RanksProgress::connect(*ranks, print);
  ASSERT_OK(progress);
  EXPECT_TRUE((*progress)->of_rank(0)(step(1, "expert 3")));
  EXPECT_TRUE((*progress)->of_rank(1)(step(2, "expert 7")));
  lines.stop();
  EXPECT_FALSE((*progress)->of_rank(0)(step(2, "expert 4")));
  EXPECT_EQ(lines.all(), (std::vector<std::string>{"load 1/8 rank 0: expert 3", "load 3/16 rank 1: expert 7",
                                                   "load 4/16 rank 0: expert 4"}));
  const ProgressFn nobody;
  const auto quiet = RanksProgress::connect(*ranks, nobody);
  ASSERT_OK(quiet);
  EXPECT_TRUE((*quiet)->of_rank(0)(step(1, "expert 3")));
}

// Processes, each a thread here: body(rank, progress, lines), lines being those of the rank.
void on_processes(int world, const std::function<RanksProgress::Timing(int rank)>& timing,
                  const std::function<void(Exchange&, RanksProgress&, Lines&)>& body) {
  const int port = free_port();
  on_threads(world, [&](int rank) {
    auto exchange = connect_tcp("127.0.0.1", port, rank, world, kLong);
    ASSERT_OK(exchange);
    const LocalRanks ranks = LocalRanks::process(std::move(*exchange), "127.0.0.1");
    Lines lines;
    const ProgressFn print = lines.function();
    auto progress = RanksProgress::connect(ranks, print, timing(rank));
    ASSERT_OK(progress);
    body(*ranks.exchange(0), **progress, lines);
    EXPECT_OK(ranks.exchange(0)->barrier());
  });
}

constexpr std::chrono::milliseconds kSoon{5}, kNever{3600 * 1000};

TEST(RanksProgress, RankZeroAddsUpWhatOtherProcessesSay) {
  on_processes(
      3,
      [](int) {
        return RanksProgress::Timing{kSoon, kNever};
      },
      [](Exchange& exchange, RanksProgress& progress, Lines& lines) {
        EXPECT_TRUE(progress.of_rank(0)(step(exchange.rank() + 1, "expert " + std::to_string(exchange.rank()))));
        if (exchange.rank() == 0) {
          EXPECT_TRUE(lines.has("load 6/24 rank 1: expert 1"));
          EXPECT_TRUE(lines.has("load 6/24 rank 2: expert 2"));
        } else {
          EXPECT_EQ(lines.all().size(), 1u) << "its own step";
        }
        EXPECT_OK(exchange.barrier());
      });
}

TEST(RanksProgress, ARankWithoutAWordIsNamed) {
  on_processes(
      3,
      [](int rank) {
        return RanksProgress::Timing{rank == 2 ? kNever : kSoon, std::chrono::milliseconds(rank == 0 ? 200 : 1)};
      },
      [](Exchange& exchange, RanksProgress& progress, Lines& lines) {
        progress.of_rank(0)(step(1, "expert"));
        if (exchange.rank() == 0) {
          EXPECT_TRUE(lines.has(" no word from rank 2 for 0 s")) << testing::PrintToString(lines.all());
        }
        EXPECT_OK(exchange.barrier());
      });
}

}  // namespace
}  // namespace nvfp4_moe::test
