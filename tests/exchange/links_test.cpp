// Links: what ranks over a host's functions see of each other's ends without a call, and what keeps them from having links.
#include "exchange/links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "exchange/linked.h"
#include "exchange/socket.h"
#include "support/forked_child.h"
#include "support/support.h"

namespace nvfp4_moe {
namespace {

using test::connect;
using test::expect_none;
using test::kLong;
using test::LinkHost;
using test::on_its_own_host;
using test::on_linked;
using test::on_threads;
using test::seen_without_a_call;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// A child that is a rank. Once it is linked it says so by a byte, then makes no call: exits with 0 once it sees what is part
// of `expected`.
pid_t linked_process(int port, int rank, int world, int linked, const std::string& expected) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::alarm(30);
  LinkHost host;
  auto inner = connect_tcp("127.0.0.1", port, rank, world, kLong);
  if (!inner.ok()) ::_exit(2);
  host.inner = std::move(*inner);
  auto exchange = connect(host);
  if (!exchange.ok() || !(*exchange)->sees_ends().ok()) ::_exit(3);
  if (::write(linked, &rank, 1) != 1) ::_exit(4);
  const std::string seen = seen_without_a_call(**exchange, kLong);
  ::_exit(seen.find(expected) != std::string::npos && seen.find("got none: it has left") != std::string::npos ? 0 : 1);
}

// Processes 1 to world - 1 beside this one, rank 0; `killed` are, once all are linked. What this rank sees without a call.
void kill_ranks(int world, const std::vector<int>& killed, const std::string& expected) {
  const int port = test::free_port();
  std::array<int, 2> linked{};
  ASSERT_EQ(::pipe(linked.data()), 0);
  std::vector<pid_t> children(1, -1);
  for (int rank = 1; rank < world; ++rank) children.push_back(linked_process(port, rank, world, linked[1], expected));
  ::close(linked[1]);  // a child that ends before is read as an end
  LinkHost host;
  auto inner = connect_tcp("127.0.0.1", port, 0, world, kLong);
  ASSERT_OK(inner);
  host.inner = std::move(*inner);
  auto exchange = connect(host);
  ASSERT_OK(exchange);
  EXPECT_OK((*exchange)->sees_ends());
  char word = 0;
  for (int rank = 1; rank < world; ++rank) ASSERT_EQ(::read(linked[0], &word, 1), 1);
  EXPECT_OK((*exchange)->look());
  for (const int rank : killed) ::kill(children[static_cast<size_t>(rank)], SIGKILL);
  const double took = test::seconds_of([&] {
    EXPECT_THAT(seen_without_a_call(**exchange), AllOf(HasSubstr(expected), HasSubstr("got none: it has left")));
  });
  EXPECT_LT(took, 1);
  EXPECT_THAT((*exchange)->barrier().message(), HasSubstr(expected));
  for (int rank = 1; rank < world; ++rank) {
    int exit = 0;
    EXPECT_EQ(::waitpid(children[static_cast<size_t>(rank)], &exit, 0), children[static_cast<size_t>(rank)]);
    const bool was_killed = std::find(killed.begin(), killed.end(), rank) != killed.end();
    // Of several, one may have seen another one's end before its own.
    if (!was_killed || exit != 0 || killed.size() == 1) {
      EXPECT_EQ(exit, was_killed ? SIGKILL : 0) << "rank " << rank;
    }
  }
  ::close(linked[0]);
}

TEST(Links, AKilledProcessIsNamedByAllOthersWithoutACall) {
  for (const int killed : {1, 2, 3}) kill_ranks(4, {killed}, "expected rank " + std::to_string(killed));
}

TEST(Links, OfSeveralKilledProcessesOneIsNamed) { kill_ranks(5, {1, 3, 4}, "exchange: expected rank "); }

TEST(Links, WhoLeavesBehindItsLastCallEndsNoCallOfOthers) {
  std::atomic<int> seen{0};
  const auto group = ThreadGroup::make(3);
  ASSERT_OK(group);
  on_threads(3, [&](int rank) {
    LinkHost host;
    auto inner = (*group)->join(rank, 3, kLong);
    ASSERT_OK(inner);
    host.inner = std::move(*inner);
    auto exchange = connect(host);
    ASSERT_OK(exchange);
    EXPECT_OK((*exchange)->barrier());
    if (rank == 1) {
      exchange->reset();
      // What the others' call moves, whose link to this rank has ended.
      const std::vector<int64_t> bytes(3, 1);
      std::array<std::byte, 3> to{}, from{};
      EXPECT_OK(host.inner->all_to_all_v(to.data(), bytes, from.data(), bytes));
      while (seen < 2) std::this_thread::sleep_for(Timeout{1});
      return;
    }
    EXPECT_OK((*exchange)->barrier());
    EXPECT_EQ(seen_without_a_call(**exchange), "exchange: expected rank 1, got none: it has left");
    ++seen;
    while (seen < 2) std::this_thread::sleep_for(Timeout{1});
  });
}

TEST(Links, AnAbortIsHeardWithoutACallThoughTheHostHasNoneToTell) {
  on_linked(3, {}, [](Exchange& exchange, LinkHost&) {
    EXPECT_OK(exchange.look());
    EXPECT_OK(exchange.barrier());
    if (exchange.rank() == 2) return exchange.abort(Status(Code::kCancelled, "stopped by its user"));
    // Who looks later may see first that another rank has heard of it.
    EXPECT_THAT(seen_without_a_call(exchange), AnyOf("rank 2: stopped by its user", HasSubstr("it has left")));
  });
}

TEST(Links, AFailureOfTheHostsFunctionIsHeardByTheOthers) {
  on_linked(2, {}, [](Exchange& exchange, LinkHost& host) {
    const std::string expected = "exchange: barrier: code 42 of the caller's function";
    if (exchange.rank() == 0) {
      host.fails = true;
      EXPECT_EQ(exchange.barrier().message(), expected);
    } else {
      EXPECT_EQ(seen_without_a_call(exchange), expected);
    }
  });
}

TEST(Links, AHostsFunctionThatFailsByAnotherRanksEndNeedNotKnowIt) {
  const auto group = ThreadGroup::make(2);
  ASSERT_OK(group);
  std::atomic<bool> over{false};
  on_threads(2, [&](int rank) {
    LinkHost host;
    auto inner = (*group)->join(rank, 2, kLong);
    ASSERT_OK(inner);
    host.inner = std::move(*inner);
    auto exchange = connect(host);
    ASSERT_OK(exchange);
    EXPECT_OK((*exchange)->barrier());
    if (rank == 1) {
      std::this_thread::sleep_for(Timeout{50});  // the other one's call has failed by then, and waits for the cause
      exchange->reset();
      while (!over) std::this_thread::sleep_for(Timeout{1});
      return;
    }
    host.fails = true;
    EXPECT_EQ((*exchange)->barrier().message(),
              "exchange: barrier: code 42 of the caller's function; exchange: expected rank 1, got none: it has left");
    over = true;
  });
}

TEST(Links, OneRankThatWantsNoneIsEnoughForNone) {
  expect_none(
      3,
      [](int rank, LinkHost&) {
        return LinkOptions{rank != 1, Timeout{3000}, ""};
      },
      ::testing::Eq("rank 1: links: expected none by the caller"));
}

TEST(Links, AWorldOfOneSeesAllEndsThereAre) {
  on_linked(1, {}, [](Exchange& exchange, LinkHost&) {
    EXPECT_OK(exchange.sees_ends());
    EXPECT_OK(exchange.look());
    EXPECT_OK(exchange.barrier());
  });
}

TEST(Links, AProcessThatMayOpenNoMoreFilesGoesWithout) {
  rlimit files{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit fewer{11, files.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &fewer), 0);
  on_linked(4, {}, [&](Exchange& exchange, LinkHost&) {
    EXPECT_EQ(exchange.sees_ends().message(),
              "rank 0: links: expected room for 3 connections, got a limit of 11 open files (ulimit -n), of which they "
              "take 2 at most");
    EXPECT_OK(exchange.barrier());
  });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
}

TEST(Links, RanksOfSeveralHostsAreLinkedByTheirAddresses) {
  if (host_addresses(1).empty()) GTEST_SKIP() << "this host has no address but loopback";
  on_linked(
      4, [](int rank, LinkHost&) { return on_its_own_host(rank); },
      [](Exchange& exchange, LinkHost&) {
        EXPECT_OK(exchange.sees_ends());
        if (exchange.rank() == 3) return exchange.abort(Status(Code::kCancelled, "stopped"));
        EXPECT_THAT(seen_without_a_call(exchange), AnyOf("rank 3: stopped", HasSubstr("it has left")));
      });
}

// In a network of its own, whose only interface is down, then up, then down again behind the ranks' backs.
TEST(Links, ANetworkThatIsNotThereIsNoneAndOneThatGoesIsAnEnd) {
  if (test::kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer lets a forked child make no thread";
  constexpr int kNone = 77;
  const auto attempt = [] {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0 && ::unshare(CLONE_NEWNET) != 0) return kNone;
    const Socket any(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const auto loopback = [&](bool up) {
      ifreq request{};
      std::strcpy(request.ifr_name, "lo");
      if (up) request.ifr_flags = IFF_UP | IFF_RUNNING;
      return ::ioctl(any.fd(), SIOCSIFFLAGS, &request) == 0;
    };
    std::atomic<int> wrong{0};
    const auto each_has = [&](const std::string& none, const std::string& end) {
      on_linked(
          2, {},
          [&](Exchange& exchange, LinkHost&) {
            if (exchange.sees_ends().message().find(none) == std::string::npos) ++wrong;
            if (exchange.sees_ends().ok() != none.empty() || !exchange.barrier().ok() || !exchange.look().ok()) ++wrong;
            if (end.empty()) return;
            if (exchange.rank() == 0 && !loopback(false)) ++wrong;
            const std::string seen = seen_without_a_call(exchange, Timeout{10000});
            if (seen != "exchange: expected rank " + std::to_string(1 - exchange.rank()) + end) ++wrong;
          },
          Timeout{2000});
    };
    each_has("links: ", "");
    if (!loopback(true)) return kNone;
    each_has("", ", got none: it has left");
    return wrong.load();
  };
  const pid_t child = ::fork();
  if (child == 0) ::_exit(attempt());
  int exit = 0;
  ASSERT_EQ(::waitpid(child, &exit, 0), child);
  ASSERT_TRUE(WIFEXITED(exit));
  if (WEXITSTATUS(exit) == kNone) GTEST_SKIP() << "no network namespace may be made here";
  EXPECT_EQ(WEXITSTATUS(exit), 0);
}

}  // namespace
}  // namespace nvfp4_moe
