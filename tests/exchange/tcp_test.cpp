// Ranks that are processes: who they are by their launcher's variables, how they meet, and how they end.
#include "exchange/tcp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <latch>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "exchange/launcher.h"
#include "exchange/ranks.h"
#include "exchange/socket.h"
#include "support/support.h"

namespace nvfp4_moe {
namespace {

using test::free_port;
using test::kLong;
using test::on_threads;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr Timeout kTcpShort{1000};
constexpr const char* kHere = "127.0.0.1";

using Environment = std::map<std::string, std::string>;
Result<LaunchedRank> launched(const Environment& set) {
  return launched_rank([&](const char* name) {
    const auto found = set.find(name);
    return found == set.end() ? nullptr : found->second.c_str();
  });
}
std::string told(const Result<LaunchedRank>& rank) {
  if (!rank.ok()) return rank.status().message();
  return rank->launcher + " " + std::to_string(rank->rank) + "/" + std::to_string(rank->world) + " local " +
         std::to_string(rank->local_rank) + " at " + rank->address + ":" + std::to_string(rank->port);
}

TEST(Launchers, EachSaysWhoThisProcessIs) {
  EXPECT_EQ(told(launched({{"RANK", "3"},
                           {"WORLD_SIZE", "8"},
                           {"LOCAL_RANK", "1"},
                           {"MASTER_ADDR", "node7"},
                           {"MASTER_PORT", "29500"}})),
            "torchrun 3/8 local 1 at node7:29501");
  const Environment mpirun = {{"OMPI_COMM_WORLD_RANK", "1"},
                              {"OMPI_COMM_WORLD_SIZE", "2"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                              {"MASTER_PORT", "1000"}};
  EXPECT_EQ(told(launched(mpirun)), "mpirun 1/2 local 1 at 127.0.0.1:1001");
  EXPECT_EQ(told(launched({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "7"}})),
            "mpirun (PMI) 0/2 local 0 at a:8");
  Environment slurm = {{"SLURM_PROCID", "5"},  {"SLURM_NTASKS", "6"},
                       {"SLURM_LOCALID", "2"}, {"SLURM_STEP_NODELIST", "gpu[03-04,09]"},
                       {"SLURM_STEP_ID", "0"}, {"MASTER_PORT", "40000"}};
  EXPECT_EQ(told(launched(slurm)), "srun 5/6 local 2 at gpu03:40001");
  slurm["SLURM_STEP_NODELIST"] = "login,gpu1";
  EXPECT_THAT(told(launched(slurm)), HasSubstr("at login:"));
  slurm.erase("SLURM_STEP_ID");  // a batch script, which is no rank
  EXPECT_THAT(told(launched(slurm)), HasSubstr("launcher: expected RANK and WORLD_SIZE"));
  Environment both = mpirun;  // mpirun inside an allocation
  both.insert({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "9"}, {"SLURM_STEP_ID", "0"}});
  EXPECT_THAT(told(launched(both)), HasSubstr("mpirun 1/2"));
}

TEST(Launchers, APortIsMadeOfTheJobsNameAlikeOnAllRanks) {
  Environment slurm = {{"SLURM_PROCID", "0"},
                       {"SLURM_NTASKS", "2"},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_JOB_ID", "4711"},
                       {"SLURM_STEP_NODELIST", "a"}};
  const auto first = launched(slurm);
  ASSERT_OK(first);
  slurm["SLURM_PROCID"] = "1";
  const auto second = launched(slurm);
  ASSERT_OK(second);
  EXPECT_EQ(first->port, second->port);
  EXPECT_GE(first->port, 20000);
  EXPECT_LT(first->port, 30000);
  slurm["SLURM_STEP_ID"] = "1";
  EXPECT_NE(launched(slurm)->port, first->port);
}

TEST(Launchers, WhatIsMissingOrNoNumberIsNamed) {
  const Environment good = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "7"}};
  const auto with = [&](const char* name, const char* value) {
    Environment set = good;
    set[name] = value;
    return told(launched(set));
  };
  EXPECT_THAT(with("RANK", "2"), HasSubstr("environment RANK: expected a number from 0 to 1, got \"2\""));
  EXPECT_THAT(with("RANK", "-1"), HasSubstr("RANK: expected"));
  EXPECT_THAT(with("RANK", "1x"), HasSubstr("got \"1x\""));
  EXPECT_THAT(with("WORLD_SIZE", "99999"), HasSubstr("WORLD_SIZE: expected a number from 1 to 1024"));
  EXPECT_THAT(with("LOCAL_RANK", "two"), HasSubstr("LOCAL_RANK"));
  EXPECT_THAT(with("MASTER_PORT", "65535"), HasSubstr("MASTER_PORT"));
  EXPECT_THAT(with("MASTER_ADDR", ""), HasSubstr("environment MASTER_ADDR: expected the host of rank 0"));
  EXPECT_THAT(with("MASTER_PORT", ""), HasSubstr("environment MASTER_PORT: expected a free port"));
  EXPECT_THAT(told(launched({{"RANK", "0"}, {"WORLD_SIZE", "1"}})), HasSubstr("torchrun 0/1"));
}

// A connection of this host between two ranks: the ends of ranks 0 and 1.
std::pair<Socket, Socket> connection() {
  const auto listener = listen_on(kHere, 0);
  EXPECT_OK(listener);
  auto end = connect_to(kHere, *local_port(*listener), Deadline(kLong));
  EXPECT_OK(end);
  auto other = accept_from(*listener);
  EXPECT_OK(other);
  return {std::move(*end), std::move(*other)};
}

// What each rank's connect says.
std::vector<std::string> meet(int threads,
                              const std::function<Result<std::unique_ptr<Exchange>>(int thread)>& connect) {
  std::vector<std::string> messages(static_cast<size_t>(threads));
  on_threads(threads, [&](int thread) { messages[static_cast<size_t>(thread)] = connect(thread).status().message(); });
  return messages;
}

TEST(Tcp, AnotherWorldOrATakenRankIsRefusedByNameOnEveryRank) {
  int port = free_port();
  EXPECT_THAT(meet(3, [&](int rank) { return connect_tcp(kHere, port, rank, rank == 1 ? 4 : 3, kLong); }),
              Each("exchange: expected ranks of a world of 3, got rank 1 of a world of 4"));
  port = free_port();
  EXPECT_THAT(meet(4, [&](int thread) { return connect_tcp(kHere, port, thread == 2 ? 1 : thread, 4, kLong); }),
              Each("exchange: expected every rank once, got rank 1 twice"));
}

TEST(Tcp, RanksThatNeverComeAreNamedOnThoseThatDid) {
  const int port = free_port();
  EXPECT_THAT(meet(2, [&](int rank) { return connect_tcp(kHere, port, rank, 4, kTcpShort); }),
              Each(AllOf(HasSubstr("in join within 1 s"), HasSubstr("ranks 2 and 3"))));
  EXPECT_THAT(connect_tcp(kHere, free_port(), 1, 2, kTcpShort).status().message(),
              HasSubstr("expected a rank that listens on 127.0.0.1 port"));
  EXPECT_THAT(connect_tcp("no-such-host.invalid", 1, 1, 2, kTcpShort).status().message(), HasSubstr("no-such-host"));
}

TEST(Tcp, ASocketThatHasConnectedToItselfIsKnown) {
  Socket alone(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(alone.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_FALSE(connected_to_itself(alone));
  address.sin_port = htons(static_cast<uint16_t>(*local_port(alone)));
  ASSERT_EQ(::connect(alone.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_TRUE(connected_to_itself(alone));
  const auto [mine, its] = connection();
  EXPECT_FALSE(connected_to_itself(mine));
  EXPECT_FALSE(connected_to_itself(its));
}

// In a network of its own, where every port that the system may choose is the one that is tried.
TEST(Tcp, ARankThatWaitsForAnotherDoesNotFindItself) {
  constexpr int kPort = 40000, kNone = 77;
  const auto attempt = [] {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0 && ::unshare(CLONE_NEWNET) != 0) return kNone;
    const Socket any(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq loopback{};
    std::strcpy(loopback.ifr_name, "lo");
    loopback.ifr_flags = IFF_UP | IFF_RUNNING;
    if (::ioctl(any.fd(), SIOCSIFFLAGS, &loopback) != 0) return kNone;
    std::ofstream range("/proc/sys/net/ipv4/ip_local_port_range");
    if (!(range << kPort << ' ' << kPort + 1 << std::flush)) return kNone;
    if (connect_to(kHere, kPort, Deadline(Timeout{200})).ok()) return 1;
    return listen_on(kHere, kPort).ok() ? 0 : 2;
  };
  const pid_t child = ::fork();
  if (child == 0) ::_exit(attempt());
  int exit = 0;
  ASSERT_EQ(::waitpid(child, &exit, 0), child);
  ASSERT_TRUE(WIFEXITED(exit));
  if (WEXITSTATUS(exit) == kNone) GTEST_SKIP() << "no network namespace may be made here";
  EXPECT_EQ(WEXITSTATUS(exit), 0);
}

TEST(Tcp, APortThatIsTakenIsNamed) {
  const auto taken = listen_on(kHere, 0);
  ASSERT_OK(taken);
  const std::string message = connect_tcp(kHere, *local_port(*taken), 0, 2, kTcpShort).status().message();
  EXPECT_THAT(message, AllOf(HasSubstr("expected to listen on 127.0.0.1"), HasSubstr("MASTER_PORT")));
}

TEST(Tcp, StrangersAreSentAwayAndHoldNobodyUp) {
  const int port = free_port();
  std::vector<Socket> strangers;
  std::latch there(1);  // rank 1 comes after the strangers: once both ranks are linked, nobody answers at the port
  on_threads(3, [&](int thread) {
    if (thread < 2) {
      if (thread == 1) there.wait();
      EXPECT_OK(connect_tcp(kHere, port, thread, 2, kLong));
      return;
    }
    const Deadline deadline(kLong);
    auto silent = connect_to(kHere, port, deadline);  // one that says nothing, one that talks
    if (silent.ok()) strangers.push_back(std::move(*silent));
    auto loud = connect_to(kHere, port, Deadline(kTcpShort));
    const std::vector<std::byte> words(200, std::byte{'x'});
    if (loud.ok()) write_all(*loud, words, deadline);
    EXPECT_TRUE(loud.ok() && !strangers.empty());
    there.count_down();
  });
}

TEST(Tcp, DifferentOperationsAreRefusedOnAll) {
  test::on_ranks(test::Over::kTcp, 3, kLong, [](Exchange& exchange) {
    const int64_t one = 1;
    int64_t all[3] = {};
    float value = 0;
    const Status status = exchange.rank() != 1 ? exchange.all_gather(&one, sizeof(one), all)
                                               : exchange.all_reduce(&value, 1, DType::kF32);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("all_gather"), HasSubstr("all_reduce"), HasSubstr("rank 1")));
  });
}

TEST(Tcp, ARankThatIsLateEndsAllInTimeAndIsNamed) {
  std::atomic<bool> over{false};
  test::on_ranks(test::Over::kTcp, 3, kTcpShort, [&](Exchange& exchange) {
    if (exchange.rank() == 1) {
      while (!over) std::this_thread::sleep_for(Timeout{10});
      return;
    }
    EXPECT_THAT(exchange.barrier().message(), HasSubstr("got none of rank 1"));
    EXPECT_THAT(exchange.barrier().message(), HasSubstr("got none of rank 1"));
    over = true;
  });
}

TEST(Tcp, AFailureIsSeenWithoutACall) {
  test::on_ranks(test::Over::kTcp, 3, kLong, [&](Exchange& exchange) {
    EXPECT_OK(exchange.look());
    EXPECT_OK(exchange.barrier());
    if (exchange.rank() == 2) {
      exchange.abort(Status(Code::kCancelled, "stopped by its user"));
      return;
    }
    const Deadline deadline(kLong);
    while (exchange.look().ok() && !deadline.passed()) std::this_thread::sleep_for(Timeout{5});
    // Who looks later may see first that another rank left, having heard the cause.
    EXPECT_THAT(exchange.look().message(), AnyOf(HasSubstr("rank 2: stopped by its user"), HasSubstr("it has left")));
  });
}

TEST(Tcp, MessagesLargerThanTheSocketsBuffersArrive) {
  constexpr int64_t kCount = 3 << 20;  // 12 MiB: each rank sends and receives at once
  test::on_ranks(test::Over::kTcp, 3, kLong, [](Exchange& exchange) {
    std::vector<float> data(kCount);
    for (int64_t i = 0; i < kCount; ++i)
      data[static_cast<size_t>(i)] = static_cast<float>((i + exchange.rank()) % 1000);
    ASSERT_OK(exchange.all_reduce(data.data(), kCount, DType::kF32));
    int64_t wrong = 0;
    for (int64_t i = 0; i < kCount; ++i)
      wrong += data[static_cast<size_t>(i)] != static_cast<float>(i % 1000 + (i + 1) % 1000 + (i + 2) % 1000);
    EXPECT_EQ(wrong, 0);
  });
}

// A child that is a rank until it is killed. Exits with 0 where its calls ended with what `expected` is a part of.
pid_t rank_process(int port, int rank, const std::string& expected) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::alarm(30);
  auto exchange = connect_tcp(kHere, port, rank, 3, kLong);
  if (!exchange.ok()) ::_exit(2);
  Status status;
  do status = (*exchange)->barrier();
  while (status.ok());
  ::_exit(status.message().find(expected) != std::string::npos ? 0 : 1);
}

TEST(Tcp, AKilledProcessEndsTheOthersAtOnceWithItsName) {
  const int port = free_port();
  const std::string expected = "expected rank 1, got none: it has left";
  const pid_t killed = rank_process(port, 1, ""), other = rank_process(port, 2, expected);
  const double took = test::seconds_of([&] {
    auto exchange = connect_tcp(kHere, port, 0, 3, kLong);
    ASSERT_OK(exchange);
    Status status;
    for (int call = 0; status.ok(); ++call) {
      if (call == 20) ::kill(killed, SIGKILL);
      status = (*exchange)->barrier();
    }
    EXPECT_THAT(status.message(), HasSubstr(expected));
    int exit = 0;
    EXPECT_EQ(::waitpid(other, &exit, 0), other);
    EXPECT_EQ(exit, 0);
    EXPECT_EQ(::waitpid(killed, &exit, 0), killed);
  });
  EXPECT_LT(took, 10);
}

// Of a world of two.
Result<std::unique_ptr<Exchange>> over(Socket socket, int rank) {
  std::vector<Socket> peers(2);
  peers[static_cast<size_t>(1 - rank)] = std::move(socket);
  return connect_peers(std::move(peers), rank, kLong);
}

// A rank waits for its stream while the other one is in its next call: its header lies there, and hides the end.
TEST(Tcp, ARankThatIsKilledInItsNextCallIsSeenWithoutACall) {
  auto [mine, its] = connection();
  const pid_t child = ::fork();
  if (child == 0) {
    mine.close();
    ::alarm(30);
    auto exchange = over(std::move(its), 1);
    if (exchange.ok()) static_cast<void>((*exchange)->barrier());
    ::_exit(1);
  }
  its.close();
  const Socket there(::dup(mine.fd()));
  auto exchange = over(std::move(mine), 0);
  ASSERT_OK(exchange);
  const Deadline deadline(kLong);
  std::byte first{};
  while (peek(there, {&first, 1}).moved == Moved::kNothingYet && !deadline.passed())
    std::this_thread::sleep_for(Timeout{5});
  EXPECT_OK((*exchange)->look());
  ::kill(child, SIGKILL);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  const Deadline soon(kTcpShort);
  while ((*exchange)->look().ok() && !soon.passed()) std::this_thread::sleep_for(Timeout{5});
  EXPECT_EQ((*exchange)->look().message(), "exchange: expected rank 1, got none: it has left");
}

TEST(Tcp, ARankThatGivesUpItsNextCallSaysWhyWithoutACall) {
  test::on_ranks(test::Over::kTcp, 2, kLong, [](Exchange& exchange) {
    constexpr const char* kWhy = "exchange: expected all 2 ranks in agree within 50 ms, got none of rank 0";
    ASSERT_OK(exchange.barrier());
    if (exchange.rank() == 1) {
      EXPECT_EQ(exchange.agree({}, Timeout{50}).message(), kWhy);
      return;
    }
    const Deadline deadline(kLong);
    while (exchange.look().ok() && !deadline.passed()) std::this_thread::sleep_for(Timeout{5});
    EXPECT_EQ(exchange.look().message(), kWhy);
  });
}

}  // namespace
}  // namespace nvfp4_moe
