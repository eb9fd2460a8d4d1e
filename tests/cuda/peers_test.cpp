// Ranks whose devices write into each other's memory: the bits of one rank with all experts by all_to_all, those of the host's
// sum by all_reduce, in graphs too, for several layers of one exchange; and how a wait ends for a rank that does not come.
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "cuda/dispatch_case.h"
#include "cuda/graph.h"
#include "cuda/reduce_case.h"

namespace nvfp4_moe {
namespace {

using namespace test;
using ::testing::HasSubstr;

class CudaPeers : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_world(GetParam(), Between::kPeers); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_P(CudaPeers, AllToAllGivesTheBitsAndCountsOfOneRank) {
  struct {
    ActivationFormat format;
    Routing routing;
    int64_t capacity, shared;
    Tokens tokens;
  } const cases[] = {
      {kNvfp4, Routing::kBadIds, 0, 16, Tokens::kEven},    {kBf16, Routing::kZipf, 0, 0, Tokens::kEven},
      {kFp8, Routing::kUniform, 0, 0, Tokens::kAllOnLast}, {kNvfp4, Routing::kOneExpert, 2, 0, Tokens::kAllOnLast},
      {kBf16, Routing::kPartlyNone, 0, 16, Tokens::kEven}, {kNvfp4, Routing::kAllNone, 0, 0, Tokens::kEven},
  };
  for (const auto& one : cases) {
    if (!runs_here(one.format)) continue;
    SCOPED_TRACE(std::string(to_string(one.format)) + " " + to_string(one.routing));
    ExpertParallelOptions options;
    options.capacity = one.capacity;  // which changes nothing: all tokens of one expert fit
    check_bits(made(dispatch_spec(9, one.routing, one.format, one.shared)), GetParam(), options, one.tokens,
               Between::kPeers);
    if (HasFailure()) return;
  }
}

TEST_P(CudaPeers, OneToManyTokensOfEveryRouting) {
  size_t turn = 0;
  // On either side of 64: of a rank's own tokens, and of those of all.
  for (const int64_t tokens : {1, 2, 33, 64, 130, 1100, 8192}) {
    for (const Routing routing : {Routing::kUniform, Routing::kZipf, Routing::kOneExpert, Routing::kEmptyExperts,
                                  Routing::kPartlyNone, Routing::kBadIds}) {
      constexpr std::array kFormats = {kNvfp4, kBf16, kFp8};
      const ActivationFormat format = kFormats[turn++ % kFormats.size()];
      const int64_t most_emulated = routing != Routing::kZipf ? 1 : GetParam() == 2 ? 130 : 33;
      if (!runs_here(format) || (emulated() && (tokens == 2 || tokens == 64 || tokens > most_emulated))) continue;
      SCOPED_TRACE(std::string(to_string(routing)) + " of " + std::to_string(tokens) + ", " + to_string(format));
      check_bits(made(dispatch_spec(tokens, routing, format, turn % 5 == 0 ? 16 : 0)), GetParam(), {}, Tokens::kEven,
                 Between::kPeers);
      if (HasFailure()) return;
    }
  }
}

TEST_P(CudaPeers, ChoicesOfALayer) {
  if (emulated() && GetParam() != 2) GTEST_SKIP() << "an emulator runs two ranks of it";
  for (const auto& [name, spec] : choices_of_a_layer()) {
    SCOPED_TRACE(name);
    check_bits(made(spec), GetParam(), {}, Tokens::kEven, Between::kPeers);
    if (HasFailure()) return;
  }
}

TEST_P(CudaPeers, AllReduceIsTheSumInTheOrderOfTheRanks) {
  const CaseData data = made(spec_of(9, 64, 32));
  const int world = GetParam();
  check_reduce(data, *Placement::round_robin(6, std::min(world, 3)), 5, Between::kPeers);
  check_reduce(data, redundant(6, std::min(world, 3)), 2, Between::kPeers);
}

// Every expert stands on two ranks. What a rank counts of the intermediate are its rows.
TEST_P(CudaPeers, RowsOfARedundantExpertAreDividedAmongItsRanks) {
  const int world = GetParam();
  if (world < 2) GTEST_SKIP() << "expected two ranks";
  for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce}) {
    CaseData data = made(dispatch_spec(8, Routing::kUniform, kNvfp4));
    choose_expert_0(data, -1);
    ExpertParallelOptions options;
    options.combine = combine;
    options.placement = redundant(8, world);
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
    for (const size_t busy : {0, 1}) EXPECT_EQ(blocks[busy], uint64_t{8 / 2 * 32 / 16}) << to_string(combine);
  }
}

// More than a MiB of sums: shard by shard, of which three ranks have no equal number.
TEST_P(CudaPeers, LargeSumsAreAddedInShards) {
  Case spec = spec_of(130, 2048, 16);
  spec.options.top_k = 1;
  check_reduce(made(spec), *Placement::contiguous(6, std::min(GetParam(), 3)), 2, Between::kPeers);
}

// Layers of one exchange that are unlike each other take turns, in graphs that were captured before a larger one took
// more memory.
TEST_P(CudaPeers, GraphsOfSeveralLayersTakeTurns) {
  const int world = GetParam();
  const CaseData small = made(dispatch_spec(4, Routing::kUniform, kNvfp4, 16)),
                 large = made(dispatch_spec(40, Routing::kZipf, kBf16)),
                 summed = made(dispatch_spec(4, Routing::kUniform, kNvfp4));
  const OneRank small_one(small), large_one(large);
  const std::vector<uint16_t> sums = expected_sum(summed, *Placement::contiguous(8, world));
  on_devices(
      small, world, {},
      [&](Rank& rank) {
        const auto open = [&](const CaseData& data, CombineBy combine) {
          ExpertParallelOptions parallel;
          parallel.combine = combine;
          return open_on_device(rank.exchange, data, parallel);
        };
        const auto capture = [&](const ExpertParallelLayer& layer, const Batch& batch,
                                 const OnDevice<uint8_t>& workspace) {
          const auto run = [&] { return layer.run(batch, workspace.data(), layer.workspace_bytes(), rank.stream); };
          EXPECT_OK(run());  // what a first call loads, no graph can
          EXPECT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
          EXPECT_OK(rank.exchange.barrier());
          return Graph(rank.stream, run);
        };
        const Graph of_small = capture(rank.layer, rank.batch.spec, rank.workspace);
        ASSERT_OK(of_small.status());
        const auto reduce = open(summed, CombineBy::kAllReduce);
        ASSERT_OK(reduce);
        const DeviceBatch reduce_batch(summed);
        const OnDevice<uint8_t> reduce_workspace((*reduce)->workspace_bytes());
        const Graph of_sums = capture(**reduce, reduce_batch.spec, reduce_workspace);
        ASSERT_OK(of_sums.status());
        const auto dispatch = open(large, CombineBy::kAllToAll);
        ASSERT_OK(dispatch);
        const DeviceBatch large_batch(large);
        const OnDevice<uint8_t> large_workspace((*dispatch)->workspace_bytes());
        const Graph of_large = capture(**dispatch, large_batch.spec, large_workspace);
        ASSERT_OK(of_large.status());
        for (int turn = 0; turn < 6; ++turn) {
          const std::array graphs = {&of_small, &of_large, &of_sums};
          for (const Graph* graph : {graphs[turn % 3], graphs[turn / 2 % 3], &of_sums}) graph->launch();
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

// The last rank does not replay what the others do: they end by the device's own clock, or where it aborts at once; out is
// NaN, and every later run says why.
void replay_without_the_last(int world, CombineBy combine, bool aborts) {
  const CaseData data = made(dispatch_spec(2, Routing::kUniform, kBf16));
  ExpertParallelOptions options;
  options.combine = combine;
  // On the emulator kernels are translated first, while ranks wait in real time.
  check_bits(data, world, {}, Tokens::kEven, Between::kPeers);
  std::atomic<int> ended{0};  // ranks that write no more to the last one's memory, which goes when it leaves
  on_ranks(Over::kThreads, world, aborts ? kCaseTimeout : Timeout{4000}, [&](Exchange& exchange) {
    ASSERT_EQ(cudaSetDevice(device_of(exchange.rank())), cudaSuccess);
    ASSERT_OK(connect_devices(exchange, Between::kPeers));
    const auto layer = open_on_device(exchange, data, options);
    ASSERT_OK(layer);
    const DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes();
    const OnDevice<uint8_t> workspace(bytes);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    const auto run = [&] { return (*layer)->run(batch.spec, workspace.data(), bytes, stream); };
    ASSERT_OK(run());
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const Graph graph(stream, run);
    ASSERT_OK(graph.status());
    ASSERT_OK(exchange.barrier());
    const std::string why = aborts ? "killed" : "rank " + std::to_string(world - 1);
    if (exchange.rank() != world - 1) {
      graph.launch();
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      ++ended;
      const std::vector<float> out = to_floats(batch.out.back(), data.spec.out_dtype);
      EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float value) { return std::isnan(value); }));
      Status said;
      for (int look = 0; look < 100 && said.ok(); ++look) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        said = exchange.peers()->state();
      }
      EXPECT_THAT(said.message(), HasSubstr(why));
      EXPECT_EQ(run().message(), said.message());
    } else if (aborts) {
      exchange.abort(Status(Code::kIo, "killed"));
    } else {
      // It hears of it too: at its next call, by the others.
      Status said;
      for (int look = 0; look < 300 && said.ok(); ++look) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        said = exchange.peers()->state();
      }
      EXPECT_THAT(said.message(), HasSubstr(why));
    }
    while (ended < world - 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    cudaStreamDestroy(stream);
  });
}

TEST_P(CudaPeers, ARankThatDoesNotComeIsNamed) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank waits for nobody";
  replay_without_the_last(GetParam(), CombineBy::kAllToAll, false);
  replay_without_the_last(GetParam(), CombineBy::kAllReduce, false);
}

TEST_P(CudaPeers, ARankThatAbortsEndsAllWaits) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank waits for nobody";
  replay_without_the_last(GetParam(), CombineBy::kAllToAll, true);
  replay_without_the_last(GetParam(), CombineBy::kAllReduce, true);
}

// Who has done its runs may go: what they gave stays good on the others, and only a later one fails.
TEST_P(CudaPeers, ARankThatLeavesSpoilsNothing) {
  const int world = GetParam();
  if (world == 1) GTEST_SKIP() << "one rank has nobody who leaves";
  const CaseData data = made(dispatch_spec(2, Routing::kUniform, kBf16));
  const OneRank one(data);
  on_ranks(Over::kThreads, world, kCaseTimeout, [&](Exchange& exchange) {
    ASSERT_EQ(cudaSetDevice(device_of(exchange.rank())), cudaSuccess);
    ASSERT_OK(connect_devices(exchange, Between::kPeers));
    const auto layer = open_on_device(exchange, data, {});
    ASSERT_OK(layer);
    const DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes();
    const OnDevice<uint8_t> workspace(bytes);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_OK((*layer)->run(batch.spec, workspace.data(), bytes));
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (exchange.rank() != 0) return;
    Status seen;
    for (int look = 0; look < 500 && seen.ok(); ++look) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      seen = exchange.peers()->state();
    }
    EXPECT_THAT(seen.message(), HasSubstr("left"));
    EXPECT_OK((*layer)->status(workspace.data(), bytes));
    EXPECT_EQ(difference_of(data, one.out, batch.out.back()), "");
    EXPECT_EQ((*layer)->run(batch.spec, workspace.data(), bytes).message(), seen.message());
  });
}

TEST_P(CudaPeers, WhatDoesNotGoIsNamedOnEveryRank) {
  const int world = GetParam(), last = world - 1;
  const CaseData data = made(dispatch_spec(4, Routing::kUniform, kBf16));
  const OneRank one(data);
  on_devices(
      data, world, {},
      [&](Rank& rank) {
        const bool mine = rank.exchange.rank() == last;
        const std::string named = "rank " + std::to_string(last) + ": ";
        EXPECT_THAT(use_peers(rank.exchange, "cuda:0").message(),
                    HasSubstr("rank 0: peers: expected an exchange without devices, got one with peers"));
        EXPECT_THAT(use_nccl(rank.exchange, "cuda:0").message(),
                    HasSubstr("rank 0: nccl: expected an exchange without peers, got one with them"));
        Batch wrong = rank.batch.spec;
        if (mine) wrong.hidden = nullptr;
        EXPECT_EQ(rank.layer.run(wrong, rank.workspace.data(), rank.workspace_bytes, rank.stream).message(),
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
    EXPECT_THAT(use_peers(exchange, "cpu").message(), HasSubstr("rank 0: peers: expected a device cuda:N, got cpu"));
    EXPECT_OK(exchange.barrier());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaPeers, ::testing::Values(1, 2, 4), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace nvfp4_moe
