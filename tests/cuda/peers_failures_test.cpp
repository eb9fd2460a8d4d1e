// Ranks whose devices write into each other's memory: if one fails, the waits of the others end.
#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "cuda/dispatch_case.h"
#include "cuda/graph.h"
#include "cuda/reduce_case.h"

namespace nvfp4_moe::internal::test {
namespace {

class CudaPeersFailures : public PeersTest {};

// The last rank's action while the others replay a graph.
enum class LastRank { kDoesNotCome, kAborts, kIsStopped };

// The other ranks' waits end by the device's own clock, or at once if the last rank aborts. Their
// out is NaN, and every later run reports why. A rank whose own waits were ended writes nothing to
// the others and sets no flag for them.
void replay_without_the_last(const CaseData& data, int world, CombineBy combine, LastRank last) {
  const bool aborts = last == LastRank::kAborts;
  const ExpertParallelOptions options = combined_by(combine);
  // The emulator first translates the kernels, while ranks wait in real time.
  if (combine == CombineBy::kAllToAll)
    check_bits(data, world, {}, Tokens::kEven, Between::kPeers);
  else
    check_reduce(data, *Placement::contiguous(data.spec.options.num_experts, world), 1,
                 Between::kPeers);
  std::atomic<int> ended{
      0};  // ranks that no longer write to the last one's memory, which is freed when it leaves
  const auto waits_for_a_failure = [](Exchange& exchange, int polls) {
    Status said;
    for (int poll = 0; poll < polls && said.ok(); ++poll) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      said = exchange.peers()->state();
    }
    return said;
  };
  on_devices(
      data, world, options,
      [&](Rank& rank) {
        Exchange& exchange = rank.exchange;
        const auto run = [&] { return rank.run(0, data.spec.tokens); };
        ASSERT_OK(run());
        ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
        const Graph graph(rank.stream, run);
        ASSERT_OK(graph.status());
        ASSERT_OK(exchange.barrier());
        const std::string why = aborts ? "killed" : "rank " + std::to_string(world - 1);
        if (exchange.rank() != world - 1) {
          graph.launch();
          EXPECT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
          ++ended;
          EXPECT_TRUE(all_nan(data, rank.out()));
          const Status said = waits_for_a_failure(exchange, 100);
          EXPECT_THAT(said.message(), HasSubstr(why));
          EXPECT_EQ(run().message(), said.message());
        } else if (aborts) {
          exchange.abort(Status(Code::kIo, "killed"));
        } else if (last == LastRank::kIsStopped) {
          exchange.peers()->abort(Status(Code::kIo, "stopped"));
          graph.launch();
          EXPECT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
          EXPECT_THAT(rank.status().status().message(), HasSubstr("stopped"));
        } else {
          // It receives the failure too, from the others, in its next call.
          EXPECT_THAT(waits_for_a_failure(exchange, 300).message(), HasSubstr(why));
        }
        while (ended < world - 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      },
      Between::kPeers, aborts ? kCaseTimeout : Timeout{4000});
}

TEST_P(CudaPeersFailures, ARankThatDoesNotComeIsNamed) {
  const CaseData data = made(dispatch_spec(2, Routing::kUniform, kBf16));
  replay_without_the_last(data, GetParam(), CombineBy::kAllToAll, LastRank::kDoesNotCome);
  replay_without_the_last(data, GetParam(), CombineBy::kAllReduce, LastRank::kDoesNotCome);
}

TEST_P(CudaPeersFailures, ARankThatAbortsEndsAllWaits) {
  const CaseData data = made(dispatch_spec(2, Routing::kUniform, kBf16));
  replay_without_the_last(data, GetParam(), CombineBy::kAllToAll, LastRank::kAborts);
  replay_without_the_last(data, GetParam(), CombineBy::kAllReduce, LastRank::kAborts);
}

TEST_P(CudaPeersFailures, WhatAStoppedRankHasLeftOutIsNotThere) {
  if (emulated() && GetParam() != 2) GTEST_SKIP() << "an emulator runs two ranks of it";
  replay_without_the_last(made(dispatch_spec(2, Routing::kUniform, kBf16)), GetParam(),
                          CombineBy::kAllToAll, LastRank::kIsStopped);
  replay_without_the_last(made(dispatch_spec(GetParam() * 65, Routing::kUniform, kBf16)),
                          GetParam(), CombineBy::kAllToAll, LastRank::kIsStopped);
  Case large = dispatch_spec(130, Routing::kUniform, kBf16);
  large.options.hidden_size = 2048;
  large.options.intermediate_size = 16;
  large.options.top_k = 1;
  replay_without_the_last(made(large), GetParam(), CombineBy::kAllReduce, LastRank::kIsStopped);
}

// A rank that has finished its runs may leave: its results stay valid on the others, and only a
// later run fails.
TEST_P(CudaPeersFailures, ARankThatLeavesSpoilsNothing) {
  const int world = GetParam();
  const CaseData data = made(dispatch_spec(2, Routing::kUniform, kBf16));
  const OneRank one(data);
  on_ranks(Over::kThreads, world, kCaseTimeout, [&](Exchange& exchange) {
    ASSERT_EQ(cudaSetDevice(device_of(exchange.rank())), cudaSuccess);
    ASSERT_OK(connect_devices(exchange, Between::kPeers));
    const auto layer = must(open_on_device(exchange, data, {}));
    const DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes();
    const OnDevice<uint8_t, 16> workspace(bytes);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_OK((*layer)->run(batch.spec, workspace.data(), bytes));
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (exchange.rank() != 0) return;
    Status seen;
    for (int poll = 0; poll < 500 && seen.ok(); ++poll) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      seen = exchange.peers()->state();
    }
    EXPECT_THAT(seen.message(), HasSubstr("left"));
    EXPECT_OK((*layer)->status(workspace.data(), bytes));
    EXPECT_EQ(difference_of(data, one.out, batch.out.back()), "");
    EXPECT_EQ((*layer)->run(batch.spec, workspace.data(), bytes).message(), seen.message());
  });
}

TEST_P(CudaPeersFailures, WhatDoesNotGoIsNamedOnEveryRank) {
  const int world = GetParam(), last = world - 1;
  const CaseData data = made(dispatch_spec(4, Routing::kUniform, kBf16));
  const OneRank one(data);
  on_devices(
      data, world, {},
      [&](Rank& rank) {
        const bool mine = rank.exchange.rank() == last;
        const std::string named = "rank " + std::to_string(last) + ": ";
        EXPECT_THAT(
            use_peers(rank.exchange, "cuda:0").message(),
            HasSubstr("rank 0: peers: expected an exchange without devices, got one with peers"));
        EXPECT_THAT(
            use_nccl(rank.exchange, "cuda:0").message(),
            HasSubstr("rank 0: nccl: expected an exchange without devices, got one with peers"));
        Batch wrong = rank.batch.spec;
        if (mine) wrong.hidden = nullptr;
        EXPECT_EQ(rank.layer.run(wrong, rank.workspace.data(), rank.workspace_bytes, rank.stream)
                      .message(),
                  named + "hidden: expected a pointer, got null");
        ASSERT_OK(rank.run(0, 4));
        EXPECT_EQ(difference_of(data, one.out, rank.out()), "") << "after what did not go";
        ASSERT_OK(rank.exchange.barrier());
        // A rank that leaves ends the run on the others.
        if (mine) {
          rank.exchange.peers()->abort(Status(Code::kIo, "a cable was pulled"));
          rank.exchange.abort(Status(Code::kIo, "killed"));
          EXPECT_EQ(rank.run(0, 4).message(), "a cable was pulled");
        } else {
          EXPECT_THAT(rank.run(0, 4).message(), HasSubstr(named + "killed"));
        }
      },
      Between::kPeers);
  on_ranks(Over::kThreads, world, kCaseTimeout, [&](Exchange& exchange) {
    EXPECT_THAT(use_peers(exchange, "cpu").message(),
                HasSubstr("rank 0: peers: expected a device cuda:N, got cpu"));
    EXPECT_OK(exchange.barrier());
  });
}

// A single rank has no other to wait for.
INSTANTIATE_TEST_SUITE_P(Ranks, CudaPeersFailures, testing::Values(2, 4),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace nvfp4_moe::internal::test
