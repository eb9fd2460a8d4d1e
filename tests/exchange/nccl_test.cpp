// NCCL's transport over its test double: its calls, the bytes that it moves, and all ways to end.
#include "exchange/nccl.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "exchange/board.h"
#include "exchange/nccl_case.h"
#include "exchange/nccl_library.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr Timeout kNcclShort{1200};

TEST(Nccl, AllToAllGivesEachRankWhatEachHasForIt) {
  on_devices(4, kLong, [](Exchange& exchange, DeviceTransport& device) {
    for (int call = 0; call < 3; ++call) {
      Blocks blocks(exchange);
      ASSERT_OK(device.all_to_all_v(blocks.call(kLong), nullptr));
      EXPECT_EQ(blocks.recv, blocks.expected);
    }
    EXPECT_OK(device.state());
    EXPECT_EQ(device.describe(), "nccl 2.28.9");
    ASSERT_OK(exchange.barrier());
  });
}

TEST(Nccl, OneGroupACallAndNothingForEmptyBlocks) {
  on_devices(1, kLong, [](Exchange& exchange, DeviceTransport& device) {
    calls();
    Blocks blocks(exchange);
    ASSERT_OK(device.all_to_all_v(blocks.call(kLong), nullptr));
    EXPECT_EQ(calls(), "group start\nsend 1 to 0\nrecv 1 from 0\ngroup end\n");
    const int64_t none = 0;
    ASSERT_OK(device.all_to_all_v({"empty", nullptr, &none, nullptr, &none, kLong}, nullptr));
    EXPECT_EQ(calls(), "group start\ngroup end\n");
  });
  EXPECT_EQ(calls(), "destroy\n");
}

// The status of connect on each of three ranks. Rank 1 uses this library.
std::vector<std::string> unconnected(const std::string& path, Timeout timeout = kLong) {
  std::vector<std::string> messages(3);
  on_ranks(Over::kThreads, 3, timeout, [&](Exchange& exchange) {
    NcclOptions options = fake();
    if (exchange.rank() == 1) options.library = path;
    messages[static_cast<size_t>(exchange.rank())] =
        connect_nccl(exchange, options).status().message();
    (void)exchange.barrier();
  });
  EXPECT_EQ(communicators(), 0) << "a communicator is left";
  return messages;
}

TEST(Nccl, ALibraryThatIsMissingTooOldOrLacksAFunctionIsNamedOnEveryRank) {
  EXPECT_THAT(unconnected("libnonesuch.so.2"),
              Each(AllOf(HasSubstr("rank 1: nccl: expected libnonesuch.so.2 as the "),
                         HasSubstr("cannot open shared object file"))));
  EXPECT_THAT(unconnected(library("_old")),
              Each(AllOf(HasSubstr("rank 1: nccl: "), HasSubstr("libfake_nccl_old.so"),
                         EndsWith("expected version 2.18.0 or later, got 2.17.5"))));
  EXPECT_THAT(unconnected(library("_partial")),
              Each(AllOf(HasSubstr("rank 1: nccl: "),
                         EndsWith("(2.28.9): expected function ncclRecv, got none"))));
}

// One copy in a process: a copy that is already loaded is found by NCCL's own name, in any folder.
TEST(Nccl, TheCopyThatTheProcessHasIsTaken) {
  if (dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD) != nullptr)
    GTEST_SKIP() << "this process has an NCCL already";
  ASSERT_NE(dlopen(library("_named").c_str(), RTLD_NOW), nullptr) << dlerror();
  const auto found = must(NcclLibrary::open());
  EXPECT_THAT((*found)->path, HasSubstr("libfake_nccl_named.so"));
  EXPECT_EQ(*NcclLibrary::open(), *found) << "opened twice";
}

TEST(Nccl, ARankWhoseCommunicatorFailsEndsAllWithItsMessage) {
  {
    const Setting fails("fail init", 2);  // rank 1; the others wait for it
    EXPECT_THAT(unconnected(library(), kNcclShort),
                Each(AnyOf(HasSubstr("rank 1: nccl: ncclCommInitRankConfig: internal error"),
                           HasSubstr("rank 0: nccl: expected a communicator of 3 ranks"))));
  }
  {
    const Setting stalls("stall init", 3);
    EXPECT_LT(seconds_of([] {
                EXPECT_THAT(unconnected(library(), kNcclShort),
                            Each(HasSubstr("expected a communicator of 3 ranks within 600 ms")));
              }),
              10);
  }
  const Setting fails("fail id");
  EXPECT_THAT(unconnected(library()),
              Each("rank 0: nccl: ncclGetUniqueId: internal error (as a test asked for)"));
}

TEST(Nccl, ACallersCommunicatorIsUsedAndLeftAlone) {
  const auto nccl = must(NcclLibrary::open(library()));
  NcclUniqueId id{};
  ASSERT_EQ((*nccl)->get_unique_id(&id), NcclResult::kSuccess);
  std::vector<NcclCommunicator> comms(2);
  on_threads(2, [&](int rank) {
    NcclConfig blocking;
    blocking.blocking = 1;
    EXPECT_EQ((*nccl)->init_rank_config(&comms[static_cast<size_t>(rank)], 2, id, rank, &blocking),
              NcclResult::kSuccess);
  });
  const auto given = [&](int rank) {
    NcclOptions options = fake();
    options.communicator = comms[static_cast<size_t>(rank)];
    return options;
  };
  on_ranks(Over::kThreads, 2, kLong, [&](Exchange& exchange) {
    const auto device = must(connect_nccl(exchange, given(exchange.rank())));
    Blocks blocks(exchange);
    ASSERT_OK((*device)->all_to_all_v(blocks.call(kLong), nullptr));
    EXPECT_EQ(blocks.recv, blocks.expected);
    (*device)->abort(Status(Code::kIo, "over"));
    EXPECT_EQ((*device)->state().message(), "over");
    EXPECT_OK(exchange.barrier());
  });
  for (const bool mixed : {false, true})  // swapped ranks; a rank without a communicator to pass
    on_ranks(Over::kThreads, 2, kLong, [&](Exchange& exchange) {
      const int rank = exchange.rank();
      const NcclOptions options = mixed && rank == 1 ? fake() : given(mixed ? 0 : 1 - rank);
      EXPECT_THAT(
          connect_nccl(exchange, options).status().message(),
          HasSubstr(mixed ? "nccl of rank 1: expected communicator given as on rank 0"
                          : "rank 0: nccl: communicator: expected rank 0 of a world of 2, got "
                            "rank 1 of a world of 2"));
      EXPECT_OK(exchange.barrier());
    });
  EXPECT_EQ(communicators(), 2);
  for (const NcclCommunicator comm : comms) (*nccl)->destroy(comm);
}

TEST(Nccl, ACallThatFailsEndsAllRanks) {
  std::atomic<bool> failed{false};
  std::optional<Blocks>
      of_rank[2];  // kept until the communicators have ended; their threads write to the blocks
  on_devices(2, kLong, [&](Exchange& exchange, DeviceTransport& device) {
    ASSERT_OK(exchange.barrier());
    Blocks& blocks = of_rank[exchange.rank()].emplace(exchange);
    if (exchange.rank() == 1) {
      {
        const Setting fails("fail send");  // of the process, and so for both ranks
        EXPECT_EQ(device.all_to_all_v(blocks.call(kLong), nullptr).message(),
                  "all_to_all_v: nccl: ncclSend: invalid usage (as a test asked for)");
      }
      failed = true;
    } else {
      while (!failed) std::this_thread::yield();
      const Status status = device.all_to_all_v(blocks.call(kLong), nullptr);
      EXPECT_THAT(status.message(), HasSubstr("rank 1"));
      EXPECT_EQ(device.state().message(), status.message());
      EXPECT_FALSE(exchange.barrier().ok());
    }
    EXPECT_FALSE(device.all_to_all_v(blocks.call(kLong), nullptr).ok());
  });
}

TEST(Nccl, ARankThatNeverComesEndsTheCallByItsTimeout) {
  std::atomic<bool> over{false};
  std::optional<Blocks> blocks;  // must outlive the communicators' threads
  const double took = seconds_of([&] {
    on_devices(2, kLong, [&](Exchange& exchange, DeviceTransport& device) {
      if (exchange.rank() == 1) {
        while (!over) std::this_thread::sleep_for(Timeout{5});
        return;
      }
      blocks.emplace(exchange);
      EXPECT_THAT(device.all_to_all_v(blocks->call(kNcclShort), nullptr).message(),
                  HasSubstr("nccl: expected all_to_all_v to be done within 1200 ms, got no end"));
      over = true;
    });
  });
  EXPECT_LT(took, 10);
}

// Work that was enqueued but does not finish: no call waits for it, and the watch detects it.
TEST(Nccl, WorkThatTheDeviceDoesNotEndIsEndedByTheWatch) {
  std::atomic<int> made{0};
  const Setting async("async"), stalls("stall");
  on_devices(
      2, kLong,
      [](Exchange& exchange, DeviceTransport& device) {
        Blocks blocks(exchange);
        ASSERT_OK(device.all_to_all_v(blocks.call(kNcclShort), nullptr));
        comes_true([&] { return !device.state().ok(); });
        EXPECT_THAT(device.state().message(), HasSubstr("to be done within 1200 ms"));
        EXPECT_EQ(device.state_of_work().message(), device.state().message());
      },
      with_events(made, false));
  EXPECT_EQ(made, 0) << "events are left";
}

// A reached event is reused by the next call: a run creates none once the longest queue has
// occurred.
TEST(Nccl, EventsAreUsedAgain) {
  std::atomic<int> made{0};
  on_devices(
      2, kLong,
      [&](Exchange& exchange, DeviceTransport& device) {
        for (int call = 0; call < 6; ++call) {
          Blocks blocks(exchange);
          ASSERT_OK(device.all_to_all_v(blocks.call(kLong), nullptr));
          std::this_thread::sleep_for(Timeout{120});  // more than two polls of the watch
        }
        EXPECT_LE(made, 4) << "of two ranks";
        ASSERT_OK(exchange.barrier());
      },
      with_events(made, true));
  EXPECT_EQ(made, 0) << "events are left";
}

TEST(Nccl, WhatNcclReportsLaterEndsAll) {
  std::atomic<int> ended{0};
  std::optional<Setting> error;
  on_devices(2, kLong, [&](Exchange& exchange, DeviceTransport& device) {
    ASSERT_OK(exchange.barrier());
    if (exchange.rank() == 0) error.emplace("async error");
    comes_true([&] { return !device.state().ok(); });
    EXPECT_THAT(device.state().message(),
                HasSubstr("ncclCommGetAsyncError: remote process exited"));
    ++ended;
    comes_true([&] { return ended == 2; });
    if (exchange.rank() == 0) error.reset();
  });
}

// One of three ranks, in a separate process: makes calls until one fails.
Status run_until_it_fails(const std::shared_ptr<Board>& board, int rank,
                          const std::function<void(int call)>& each) {
  std::optional<Blocks> blocks;  // must outlive the communicators' threads
  BoardRank end(board, rank, 3);
  NVFP4_MOE_ASSIGN(const auto exchange, end.connect(kLong));
  NVFP4_MOE_ASSIGN(auto device, connect_nccl(*exchange, fake()));
  exchange->set_device(std::move(device));
  for (int call = 0;; ++call) {
    each(call);
    blocks.emplace(*exchange);
    NVFP4_MOE_TRY(exchange->device()->all_to_all_v(blocks->call(kLong), nullptr));
  }
}

TEST(Nccl, AKilledProcessEndsTheOthersAtOnceWithItsName) {
  const auto board = Board::make();
  const std::string expected = "expected rank 1, got none: it has left";
  pid_t children[2];
  for (int child = 0; child < 2; ++child) {
    children[child] = ::fork();
    if (children[child] != 0) continue;
    ::alarm(30);
    const Status status = run_until_it_fails(board, child + 1, [](int) {});
    ::_exit(status.message().find(expected) != std::string::npos ? 0 : 1);
  }
  const double took = seconds_of([&] {
    const Status status = run_until_it_fails(board, 0, [&](int call) {
      if (call == 10) ::kill(children[0], SIGKILL);
    });
    EXPECT_THAT(status.message(), HasSubstr(expected));
    int exit = 0;
    EXPECT_EQ(::waitpid(children[1], &exit, 0), children[1]);
    EXPECT_EQ(exit, 0);
    EXPECT_EQ(::waitpid(children[0], &exit, 0), children[0]);
  });
  EXPECT_LT(took, 10);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
