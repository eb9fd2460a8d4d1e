// Ending NCCL's transport: it never waits for a graph; and the effect on earlier work.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <thread>

#include "exchange/nccl.h"
#include "exchange/nccl_case.h"

namespace nvfp4_moe::internal::test {
namespace {

// A rank that leaves after its last run does not harm what the others received from it. Replays of
// graphs get an error.
TEST(NcclEnd, AFailureBehindFinishedWorkIsNoneOfThatWork) {
  for (const bool captured : {false, true}) {
    std::atomic<int> made{0};
    on_devices(
        2, kLong,
        [captured](Exchange& exchange, DeviceTransport& device) {
          Blocks blocks(exchange);
          ASSERT_OK(device.all_to_all_v(blocks.call(kLong), nullptr, captured));
          ASSERT_OK(exchange.barrier());
          if (exchange.rank() == 0) return;
          comes_true([&] { return !device.state().ok(); });
          EXPECT_THAT(device.state().message(),
                      HasSubstr("expected rank 0, got none: it has left"));
          EXPECT_EQ(device.state_of_work().message(), captured ? device.state().message() : "");
        },
        with_events(made, true));
  }
}

// One call that the transport treats as captured: from then on graphs may hold the communicator.
Status capture(Exchange& exchange, DeviceTransport& device) {
  Blocks blocks(exchange);
  return device.all_to_all_v(blocks.call(kLong), nullptr, true);
}

// Two ranks that drop their communicators after `body` while graphs hold them.
void while_graphs_hold_them(Over over,
                            const std::function<void(Exchange&, DeviceTransport&)>& body) {
  {
    const Setting graphs("graphs");
    on_ranks(over, 2, kLong, [&](Exchange& exchange) {
      auto device = must(connect_nccl(exchange, fake()));
      exchange.set_device(std::move(*device));
      ASSERT_OK(capture(exchange, *exchange.device()));
      ASSERT_OK(exchange.barrier());
      body(exchange, *exchange.device());
      EXPECT_LT(seconds_of([&] { exchange.set_device(nullptr); }), 5) << "waited for the graphs";
    });
    EXPECT_EQ(communicators(), 2) << "ended while graphs held them";
  }
  EXPECT_TRUE(comes_true([] { return communicators() == 0; })) << "not ended behind the last graph";
}

// A graph may be dropped by the very thread that drops the exchange before it.
TEST(NcclEnd, DroppingDoesNotWaitForGraphs) {
  while_graphs_hold_them(Over::kThreads, [](Exchange&, DeviceTransport&) {});
  EXPECT_THAT(calls(), EndsWith("destroy\ndestroy\n"));
}

TEST(NcclEnd, AbortingDoesNotWaitForGraphs) {
  while_graphs_hold_them(Over::kCallbacks, [](Exchange& exchange, DeviceTransport& device) {
    if (exchange.rank() == 1) {
      EXPECT_LT(seconds_of([&] {
                  exchange.abort(Status(Code::kIo, "over"));
                  device.abort(Status(Code::kIo, "over"));
                }),
                5);
    }
    EXPECT_TRUE(comes_true([&] { return !device.state().ok(); })) << "the watch waits";
    EXPECT_LT(
        seconds_of([&] { EXPECT_THAT(capture(exchange, device).message(), HasSubstr("over")); }),
        5);
  });
  EXPECT_THAT(calls(), EndsWith("abort\nabort\n"));
}

// The watch polls every 50 ms. Destroying a communicator waits for the other ranks, and one of them
// may be stopped.
TEST(NcclEnd, AnExchangeThatHasFailedIsAbortedHoweverSoonItIsDropped) {
  {
    const Setting never_ends("graphs");
    on_ranks(Over::kCallbacks, 2, kLong, [](Exchange& exchange) {
      auto device = must(connect_nccl(exchange, fake()));
      calls();
      ASSERT_OK(exchange.barrier());
      if (exchange.rank() == 1) exchange.abort(Status(Code::kIo, "over"));
      EXPECT_FALSE(exchange.barrier().ok());
      EXPECT_LT(seconds_of([&] { device->reset(); }), 5);
    });
    EXPECT_THAT(calls(), EndsWith("abort\nabort\n"));
  }
  EXPECT_TRUE(comes_true([] { return communicators() == 0; }));
}

// A communicator that no graph can hold has ended once its exchange is gone, however long that
// takes.
TEST(NcclEnd, WhatWasNeverCapturedEndsWithItsExchange) {
  std::thread later;
  on_devices(2, kLong, [&](Exchange& exchange, DeviceTransport& device) {
    Blocks blocks(exchange);
    ASSERT_OK(device.all_to_all_v(blocks.call(kLong), nullptr));
    ASSERT_OK(exchange.barrier());
    if (exchange.rank() != 0) return;
    static const Setting* slow = nullptr;
    slow = new Setting("graphs");
    later = std::thread([] {
      std::this_thread::sleep_for(Timeout{1000});
      delete slow;
    });
  });
  later.join();
}

// A process exits with its code while a graph that is never dropped holds a communicator, and while
// a communicator is about to end.
TEST(NcclEnd, AProcessEndsWhileAGraphHoldsACommunicator) {
  for (const bool dropped : {false, true}) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(30);
      static const Setting* const graphs = new Setting("graphs");
      auto exchange = (*ThreadGroup::make(1))->join(0, 1, kLong);
      if (!exchange.ok()) ::_exit(2);
      auto device = connect_nccl(**exchange, fake());
      if (!device.ok() || !capture(**exchange, **device).ok()) ::_exit(3);
      device->reset();
      if (dropped) delete graphs;
      std::exit(communicators() == 1 || dropped ? 0 : 4);
    }
    int exit = 0;
    const double took = seconds_of([&] { EXPECT_EQ(::waitpid(child, &exit, 0), child); });
    EXPECT_EQ(exit, 0);
    EXPECT_LT(took, 10);
  }
}

// A graph may be dropped long after its exchange, and right before the process ends.
void drop_the_graph_at_last() {
  std::atexit([] {  // runs after the library's own function
    if (communicators() != 0) ::_exit(5);
  });
  static const Setting* const graphs = new Setting("graphs");
  auto exchange = (*ThreadGroup::make(1))->join(0, 1, kLong);
  if (!exchange.ok()) ::_exit(2);
  auto device = connect_nccl(**exchange, fake());
  if (!device.ok() || !capture(**exchange, **device).ok()) ::_exit(3);
  device->reset();
  std::this_thread::sleep_for(Timeout{3500});
  delete graphs;
  std::exit(0);
}

TEST(NcclEnd, AProcessWaitsForACommunicatorThatEndsAtLast) {
  GTEST_FLAG_SET(
      death_test_style,
      "threadsafe");  // a separate process, in which the library has registered nothing yet
  EXPECT_EXIT(drop_the_graph_at_last(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
