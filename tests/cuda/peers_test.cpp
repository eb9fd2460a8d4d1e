// Ranks whose devices write into each other's memory give the bits of one rank, and of the host's
// sum.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/dispatch_case.h"
#include "cuda/graph.h"
#include "cuda/reduce_case.h"

namespace nvfp4_moe::internal::test {
namespace {

using CudaPeers = WorldTest<Between::kPeers>;

// Every expert is on two ranks. A rank's counts of the intermediate are those of its rows.
TEST_P(CudaPeers, RowsOfARedundantExpertAreDividedAmongItsRanks) {
  const int world = GetParam();
  if (world < 2) GTEST_SKIP() << "expected two ranks";
  for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce}) {
    CaseData data = made(dispatch_spec(8, Routing::kUniform, kNvfp4));
    choose_expert_0(data, -1);
    ExpertParallelOptions options{.combine = combine, .placement = redundant(8, world)};
    std::vector<uint64_t> blocks(static_cast<size_t>(world));
    on_devices(
        data, world, options,
        [&](Rank& rank) {
          const int me = rank.exchange.rank();
          const auto [first, count] = combine == CombineBy::kAllReduce
                                          ? std::pair(int64_t{0}, data.spec.tokens)
                                          : tokens_of(Tokens::kEven, data.spec.tokens, me, world);
          ASSERT_OK(rank.run(first, count));
          ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
          blocks[static_cast<size_t>(me)] = rank.status()->intermediate_blocks;
        },
        Between::kPeers);
    std::sort(blocks.rbegin(), blocks.rend());
    for (const size_t busy : {0, 1})
      EXPECT_EQ(blocks[busy], uint64_t{8 / 2 * 32 / 16}) << to_string(combine);
  }
}

// Different layers of one exchange run alternately, in graphs that were captured before a larger
// layer took more memory.
TEST_P(CudaPeers, GraphsOfSeveralLayersTakeTurns) {
  const int world = GetParam();
  const CaseData small = made(dispatch_spec(4, Routing::kUniform, kNvfp4, 16)),
                 large = made(dispatch_spec(40, Routing::kZipf, kBf16)),
                 summed = made(dispatch_spec(4, Routing::kUniform, kNvfp4));
  const OneRank small_one(small), large_one(large);
  const std::vector<uint8_t> sums = expected_sum(summed, *Placement::contiguous(8, world));
  on_devices(
      small, world, {},
      [&](Rank& rank) {
        const auto open = [&](const CaseData& data, CombineBy combine) {
          ExpertParallelOptions parallel;
          parallel.combine = combine;
          return open_on_device(rank.exchange, data, parallel);
        };
        const auto capture = [&](const MoeLayer& layer, const Batch& batch,
                                 const OnDevice<uint8_t, 16>& workspace) {
          const auto run = [&] {
            return layer.run(batch, workspace.data(), layer.workspace_bytes(), rank.stream);
          };
          EXPECT_OK(run());  // a graph cannot load what a first call loads
          EXPECT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
          EXPECT_OK(rank.exchange.barrier());
          return Graph(rank.stream, run);
        };
        const Graph of_small = capture(rank.layer, rank.batch.spec, rank.workspace);
        ASSERT_OK(of_small.status());
        const auto reduce = must(open(summed, CombineBy::kAllReduce));
        const DeviceBatch reduce_batch(summed);
        const OnDevice<uint8_t, 16> reduce_workspace((*reduce)->workspace_bytes());
        const Graph of_sums = capture(**reduce, reduce_batch.spec, reduce_workspace);
        ASSERT_OK(of_sums.status());
        const auto dispatch = must(open(large, CombineBy::kAllToAll));
        const DeviceBatch large_batch(large);
        const OnDevice<uint8_t, 16> large_workspace((*dispatch)->workspace_bytes());
        const Graph of_large = capture(**dispatch, large_batch.spec, large_workspace);
        ASSERT_OK(of_large.status());
        for (int turn = 0; turn < 6; ++turn) {
          const std::array graphs = {&of_small, &of_large, &of_sums};
          for (const Graph* graph : {graphs[turn % 3], graphs[turn / 2 % 3], &of_sums})
            graph->launch();
        }
        ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
        EXPECT_EQ(difference_of(small, small_one.out, rank.batch.out.back()), "");
        EXPECT_EQ(difference_of(large, large_one.out, large_batch.out.back()), "");
        const std::vector<uint8_t> out = reduce_batch.out.back();
        EXPECT_EQ(std::memcmp(out.data(), sums.data(), out.size()), 0);
        EXPECT_OK(rank.exchange.peers()->state());
        ASSERT_OK(rank.exchange.barrier());
      },
      Between::kPeers);
}

// Data of another layer is not mistaken for the flag that a rank waits for. The weights of the
// layer that runs before have the bits of the run's number. With these sizes, for two and for four
// ranks, one of them is stored at the position of the flag that follows a packet from the last rank
// to the first.
TEST_P(CudaPeers, WhatAnotherLayerHasLeftIsNoFlag) {
  const int world = GetParam(), last = world - 1;
  if (world == 1) GTEST_SKIP() << "one rank writes its packets before it reads them";
  Case before = dispatch_spec(4, Routing::kUniform, kNvfp4), behind = before;
  before.options.top_k = 8;
  behind.options.top_k = 6;
  CaseData left = made(before);
  for (int64_t at = 0; at < 4 * 8; ++at) left.set_id(at / 8, at % 8, 0);  // the first rank's
  const CaseData data = made(behind);
  const OneRank one(data);
  on_devices(
      data, world, {},
      [&](Rank& rank) {
        const int me = rank.exchange.rank();
        const auto other = must(open_on_device(rank.exchange, left, {}));
        DeviceBatch other_batch(left);
        const OnDevice<uint8_t, 16> other_workspace((*other)->workspace_bytes());
        const Rank leaves{left,        rank.exchange,   **other,
                          other_batch, other_workspace, (*other)->workspace_bytes(),
                          rank.stream};
        const auto replay_of = [&](const Rank& of) {
          const auto run = [&of] { return of.run(0, 4); };
          EXPECT_OK(run());  // a graph cannot load what a first call loads
          EXPECT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
          EXPECT_OK(rank.exchange.barrier());
          return std::make_unique<Graph>(rank.stream, run);
        };
        const auto graph = replay_of(rank), leaving = replay_of(leaves);
        PeerControl control{};
        ASSERT_EQ(cudaMemcpy(&control, rank.exchange.peers()->link().wait.control, sizeof(control),
                             cudaMemcpyDeviceToHost),
                  cudaSuccess);
        // of the run after the next one
        const auto number = static_cast<uint32_t>(control.dispatch_of_rows + 2);
        const std::vector<uint32_t> numbers(left.topk_weights.size(), number);
        ASSERT_EQ(cudaMemcpy(other_batch.weights.data(), numbers.data(),
                             numbers.size() * sizeof(uint32_t), cudaMemcpyHostToDevice),
                  cudaSuccess);
        ASSERT_EQ(cudaMemset(rank.batch.out.data(), 0xFF, data.out_bytes()), cudaSuccess);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        leaving->launch();
        ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
        ASSERT_OK(rank.exchange.barrier());
        // The others read before it writes.
        if (me == last) std::this_thread::sleep_for(std::chrono::milliseconds(300));
        graph->launch();
        EXPECT_EQ(difference_of(data, one.out, rank.out()), "") << "rank " << me;
        EXPECT_OK(rank.status());
        ASSERT_OK(rank.exchange.barrier());
      },
      Between::kPeers);
}

// A graph holds the addresses of the tables that map ids to ranks.
TEST_P(CudaPeers, ACapturedRunGoesByTheNextPlacement) {
  const int world = GetParam();
  const CaseData data = made(dispatch_spec(8, Routing::kUniform, kNvfp4));
  const OneRank one(data);
  for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce}) {
    const ExpertParallelOptions options = combined_by(combine);
    const std::vector<uint8_t> sums = expected_sum(data, round_robin(8, world));
    on_devices(
        data, world, options,
        [&](Rank& rank) {
          ASSERT_OK(rank.run(0, 8));
          rank.out();
          ASSERT_OK(rank.exchange.barrier());
          const Replay replay(rank, 0, 8);
          ASSERT_OK(replay.status());
          ASSERT_OK(ranks_of(rank.layer).rearrange(round_robin(8, world), source_of(data)));
          const std::vector<uint8_t> out = replay.run(data);
          if (combine == CombineBy::kAllToAll) {
            EXPECT_EQ(difference_of(data, one.out, out), "");
          } else {
            EXPECT_EQ(std::memcmp(out.data(), sums.data(), out.size()), 0);
          }
          ASSERT_OK(rank.exchange.barrier());
        },
        Between::kPeers);
  }
}

// Only sums in which ranks wait for each other count as rounds: an empty sum does not.
TEST_P(CudaPeers, ASumOfNoTokensIsNoRound) {
  const ExpertParallelOptions options = combined_by(CombineBy::kAllReduce);
  on_devices(
      made(dispatch_spec(4, Routing::kUniform, kNvfp4)), GetParam(), options,
      [&](Rank& rank) {
        const auto rounds = [&] {
          EXPECT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
          PeerControl control{};
          EXPECT_EQ(cudaMemcpy(&control, rank.exchange.peers()->link().wait.control,
                               sizeof(control), cudaMemcpyDeviceToHost),
                    cudaSuccess);
          return control.round;
        };
        for (const int64_t tokens : {4, 0, 0, 4}) ASSERT_OK(rank.run(0, tokens));
        EXPECT_EQ(rounds(), 2u);
        EXPECT_OK(rank.status());
      },
      Between::kPeers);
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaPeers, testing::Values(1, 2, 4),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace nvfp4_moe::internal::test
