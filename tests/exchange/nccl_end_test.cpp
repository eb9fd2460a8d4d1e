// Ending NCCL's transport: it never waits for a graph; and the effect on earlier work.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
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

// Two ranks drop or abort their communicators while graphs hold them. A graph may be dropped by the
// very thread that drops the exchange before it.
TEST(NcclEnd, DroppingAndAbortingDoNotWaitForGraphs) {
  for (const bool aborts : {false, true}) {
    {
      const Setting graphs("graphs");
      on_ranks(aborts ? Over::kCallbacks : Over::kThreads, 2, kLong, [&](Exchange& exchange) {
        exchange.set_device(std::move(*must(connect_nccl(exchange, fake()))));
        DeviceTransport& device = *exchange.device();
        ASSERT_OK(capture(exchange, device));
        ASSERT_OK(exchange.barrier());
        const double took = seconds_of([&] {
          if (aborts && exchange.rank() == 1) {
            exchange.abort(Status(Code::kIo, "over"));
            device.abort(Status(Code::kIo, "over"));
          }
          if (aborts) {
            EXPECT_TRUE(comes_true([&] { return !device.state().ok(); })) << "the watch waits";
            EXPECT_THAT(capture(exchange, device).message(), HasSubstr("over"));
          }
          exchange.set_device(nullptr);
        });
        EXPECT_LT(took, 10) << "waited for the graphs";
      });
      EXPECT_EQ(communicators(), 2) << "ended while graphs held them";
    }
    EXPECT_TRUE(comes_true([] { return communicators() == 0; }))
        << "not ended after the last graph";
    EXPECT_THAT(calls(), EndsWith(aborts ? "abort\nabort\n" : "destroy\ndestroy\n"));
  }
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

// Captures a communicator and drops its exchange. The graph is dropped now, after a time, or never.
enum class Graph { kStays, kDropped, kDroppedLate };
void exit_with_a_captured_communicator(Graph graph) {
  std::atexit([] {  // runs after the library's own function
    if (communicators() != 0) ::_exit(5);
  });
  auto graphs = std::make_unique<Setting>("graphs");
  auto exchange = (*ThreadGroup::make(1))->join(0, 1, kLong);
  if (!exchange.ok()) ::_exit(2);
  auto device = connect_nccl(**exchange, fake());
  if (!device.ok() || !capture(**exchange, **device).ok()) ::_exit(3);
  device->reset();
  if (graph == Graph::kDroppedLate) std::this_thread::sleep_for(Timeout{3500});
  if (graph == Graph::kStays)
    static_cast<void>(graphs.release());
  else
    graphs.reset();
  std::exit(0);
}

// A process exits with its code while a graph that is never dropped holds a communicator, and waits
// for a communicator that is about to end, also if its graph lives long after its exchange.
TEST(NcclEnd, AProcessEndsWhileAGraphHoldsACommunicator) {
  // a separate process, in which the library has registered nothing yet
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_LT(seconds_of([] {
              EXPECT_EXIT(exit_with_a_captured_communicator(Graph::kStays),
                          testing::ExitedWithCode(5), "");
            }),
            10);
  for (const Graph graph : {Graph::kDropped, Graph::kDroppedLate})
    EXPECT_EXIT(exit_with_a_captured_communicator(graph), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
