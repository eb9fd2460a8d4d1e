// Ranks poll each other's processes: exits and failures are reported without a call. Also the cases
// in which a rank cannot poll.
#include "exchange/processes.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exchange/board.h"
#include "exchange/ranks.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

std::string polled(Exchange& exchange, Timeout within = Timeout{2000}) {
  const Deadline deadline(within);
  while (exchange.poll().ok() && !deadline.passed()) std::this_thread::sleep_for(Timeout{5});
  return exchange.poll().message();
}

// Each rank on a thread of this process. The exchanges are destroyed when all bodies have returned.
void on_board(int world, const std::function<void(Exchange& exchange, BoardRank& rank)>& body) {
  const auto board = Board::make();
  std::atomic<int> returned{0};
  on_threads(world, [&](int rank) {
    BoardRank end(board, rank, world);
    const auto exchange = must(end.connect(kLong));
    body(**exchange, end);
    for (++returned; returned < world;) std::this_thread::sleep_for(Timeout{1});
  });
}

// A child process as a rank. It writes a byte once it is connected, then makes no call. It exits
// with 0 once a poll reports that a rank has left.
pid_t start_rank(const std::shared_ptr<Board>& board, int rank, int world, int connected) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::alarm(30);
  BoardRank end(board, rank, world);
  auto exchange = end.connect(kLong);
  if (!exchange.ok() || !(*exchange)->can_poll().ok()) ::_exit(3);
  if (::write(connected, &rank, 1) != 1) ::_exit(4);
  const std::string seen = polled(**exchange, kLong);
  ::_exit(seen.find("got none: it has left") != std::string::npos ? 0 : 1);
}

// Ranks 1 to world - 1 are processes; this one is rank 0. Some are killed while no rank makes a
// call.
TEST(Processes, KilledOnesAreNamedByAllOthersWithoutACall) {
  for (const std::vector<int>& killed : std::vector<std::vector<int>>{{2}, {1, 3, 4}}) {
    constexpr int kRanks = 5;
    const auto board = Board::make();
    std::array<int, 2> connected{};
    ASSERT_EQ(::pipe(connected.data()), 0);
    std::vector<pid_t> children(1, -1);
    for (int rank = 1; rank < kRanks; ++rank)
      children.push_back(start_rank(board, rank, kRanks, connected[1]));
    ::close(connected[1]);  // if a child ends earlier, the read reports end of file
    BoardRank end(board, 0, kRanks);
    const auto exchange = must(end.connect(kLong));
    EXPECT_OK((*exchange)->can_poll());
    char word = 0;
    for (int rank = 1; rank < kRanks; ++rank) ASSERT_EQ(::read(connected[0], &word, 1), 1);
    ::close(connected[0]);
    EXPECT_OK((*exchange)->poll());
    for (const int rank : killed) ::kill(children[static_cast<size_t>(rank)], SIGKILL);
    const std::string expected =
        "expected rank " + (killed.size() > 1 ? "" : std::to_string(killed[0]) + ", got none");
    const double took = seconds_of([&] { EXPECT_THAT(polled(**exchange), HasSubstr(expected)); });
    EXPECT_LT(took, 1);
    EXPECT_THAT((*exchange)->barrier().message(),
                AllOf(HasSubstr(expected), HasSubstr("it has left")));
    for (int rank = 1; rank < kRanks; ++rank) {
      int exit = 0;
      const pid_t child = children[static_cast<size_t>(rank)];
      EXPECT_EQ(::waitpid(child, &exit, 0), child);
      // A killed rank may have detected another one's end before its own.
      const bool was_killed = std::find(killed.begin(), killed.end(), rank) != killed.end();
      EXPECT_TRUE(exit == (was_killed ? SIGKILL : 0) || (exit == 0 && killed.size() > 1))
          << "rank " << rank << ": " << exit;
    }
  }
}

TEST(Processes, ARankThatIsStoppedIsNamedByACallsTimeoutAndWithoutACall) {
  for (const bool by_a_call : {true, false}) {
    const auto board = Board::make();
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(30);
      BoardRank end(board, 1, 2);
      const auto exchange = end.connect(kLong);
      while (exchange.ok() && (*exchange)->barrier().ok() && by_a_call) {
      }
      if (!by_a_call) ::sleep(30);
      ::_exit(0);
    }
    BoardRank end(board, 0, 2);
    const auto exchange = must(end.connect(Timeout{500}));
    ASSERT_OK((*exchange)->barrier());
    ::kill(child, SIGSTOP);
    Status status;
    const double took = seconds_of([&] {
      while (status.ok()) status = by_a_call ? (*exchange)->barrier() : (*exchange)->poll();
    });
    EXPECT_THAT(status.message(),
                HasSubstr(by_a_call ? "no bytes of rank 1"
                                    : "exchange: expected rank 1 to run, got a process that was "
                                      "stopped for 500 ms (SIGSTOP)"));
    EXPECT_LT(took, 3);
    ::kill(child, SIGKILL);
    int exit = 0;
    EXPECT_EQ(::waitpid(child, &exit, 0), child);
  }
}

TEST(Processes, ARankThatLeavesAfterItsLastCallFailsNoCallOfOthers) {
  std::atomic<int> seen{0};
  const auto board = Board::make();
  on_threads(3, [&](int rank) {
    BoardRank end(board, rank, 3);
    auto exchange = must(end.connect(kLong));
    EXPECT_OK((*exchange)->barrier());
    if (rank == 1) {
      exchange->reset();
    } else {
      EXPECT_EQ(polled(**exchange), "exchange: expected rank 1, got none: it has left");
      ++seen;
    }
    while (seen < 2) std::this_thread::sleep_for(Timeout{1});
  });
}

TEST(Processes, AnAbortOfAnyLengthIsPolledThoughTheHostHasNone) {
  for (const std::string& why : {std::string("stopped by its user"), std::string(4000, 'x')})
    on_board(3, [&](Exchange& exchange, BoardRank&) {
      EXPECT_OK(exchange.poll());
      EXPECT_OK(exchange.barrier());
      if (exchange.rank() == 2) return exchange.abort(Status(Code::kCancelled, why));
      EXPECT_EQ(polled(exchange), ("rank 2: " + why).substr(0, 503));
      EXPECT_EQ(exchange.barrier().code(), Code::kCancelled);
    });
}

// A host's function need not know which rank's end made it fail.
TEST(Processes, AFailureOfTheHostsFunctionIsPolledByTheOthersAndNamesTheEndThatCausedIt) {
  const std::string fails = "exchange: barrier: code 42 of the caller's function";
  on_board(2, [&](Exchange& exchange, BoardRank& rank) {
    rank.fails = exchange.rank() == 0;
    EXPECT_EQ(rank.fails ? exchange.barrier().message() : polled(exchange), fails);
  });
  const auto board = Board::make();
  std::atomic<bool> over{false};
  on_threads(2, [&](int rank) {
    BoardRank end(board, rank, 2);
    auto exchange = must(end.connect(kLong));
    EXPECT_OK((*exchange)->barrier());
    end.fails = rank == 0;
    if (rank == 0) {
      EXPECT_EQ((*exchange)->barrier().message(),
                fails + "; exchange: expected rank 1, got none: it has left");
      over = true;
      return;
    }
    // the other rank's call has failed by then and waits for the cause
    std::this_thread::sleep_for(Timeout{50});
    exchange->reset();
    while (!over) std::this_thread::sleep_for(Timeout{1});
  });
}

ptrdiff_t open_files() {
  const auto all = std::filesystem::directory_iterator("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

TEST(Processes, AProcessThatMayOpenNoMoreFilesGoesWithoutOnAllRanks) {
#ifdef NVFP4_MOE_SANITIZED
  GTEST_SKIP() << "the sanitizer opens files of its own to check a virtual call";
#endif
  rlimit files{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  const ptrdiff_t before = open_files();
  for (const rlim_t more : {0, 2, 5, 7}) {  // for pages, for /proc, for the other processes
    const rlimit fewer{static_cast<rlim_t>(before) - 1 + more, files.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &fewer), 0);
    on_board(4, [](Exchange& exchange, BoardRank&) {
      EXPECT_EQ(exchange.can_poll().code(), Code::kUnsupported);
      EXPECT_THAT(exchange.can_poll().message(),
                  AllOf(HasSubstr("processes: expected "), HasSubstr("Too many open files")));
      EXPECT_OK(exchange.barrier());
      EXPECT_OK(exchange.poll());
      EXPECT_OK(exchange.barrier());
    });
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
    EXPECT_EQ(open_files(), before) << "a file stays open";
  }
}

TEST(Processes, NothingStaysOpenAndNothingListens) {
  const ptrdiff_t before = open_files();
  on_board(3, [](Exchange& exchange, BoardRank&) {
    EXPECT_OK(exchange.barrier());
    // Sockets are links of the form socket:[NUMBER].
    for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const std::string target = std::filesystem::read_symlink(file, gone).string();
      EXPECT_NE(target.substr(0, 7), "socket:");
    }
    EXPECT_OK(exchange.barrier());
  });
  EXPECT_EQ(open_files(), before) << "a file stays open";
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
