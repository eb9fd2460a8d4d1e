// A layer over ranks on a GPU: all_reduce against the sum of the ranks' layers, run one by one.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/graph.h"
#include "cuda/reduce_case.h"

namespace nvfp4_moe::internal::test {
namespace {

class CudaRanks : public testing::Test {
 protected:
  void SetUp() override {
    const auto device = device_facts("cuda:0");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    if (!emulated()) GTEST_SKIP() << "NCCL's double reaches the emulator's memory alone";
  }
};

TEST_F(CudaRanks, AllReduceIsTheSumInTheOrderOfTheRanks) {
  const CaseData data = made(spec_of(9, 64, 32));
  for (const int world : {1, 3}) check_reduce(data, *Placement::contiguous(6, world), 2);
  check_reduce(data, round_robin(6, 2), 2);
  check_reduce(data, redundant(6, 3), 2);
}

// Sums above 1 MiB are added in shards, which are unequal with three ranks.
TEST_F(CudaRanks, LargeSumsAreAddedInShards) {
  Case spec = spec_of(130, 2048, 16);
  spec.options.top_k = 1;
  check_reduce(made(spec), *Placement::contiguous(6, 3), 1);
}

TEST_F(CudaRanks, WhatADeviceDoesNotRunIsRefusedByNameOnEveryRank) {
  const CaseData data = made(spec_of(4, 64, 32));
  on_ranks(Over::kThreads, 2, kCaseTimeout, [&](Exchange& exchange) {
    ExpertParallelOptions options;
    const auto open = [&] { return open_on_device(exchange, data, options).status().message(); };
    for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce}) {
      options.combine = combine;
      EXPECT_THAT(
          open(),
          HasSubstr("rank 0: device: expected cpu for a layer over an exchange without NCCL"));
    }
    EXPECT_THAT(use_nccl(exchange, "cpu").message(),
                HasSubstr("rank 0: nccl: expected a device cuda:N, got cpu"));
    EXPECT_THAT(use_nccl(exchange, "cuda:9", kFakeNccl).message(),
                HasSubstr("rank 0: device cuda:9"));
    EXPECT_OK(exchange.barrier());
  });
}

// A rank that cannot run reports that before anything is enqueued, and the next run succeeds.
TEST_F(CudaRanks, ARankWithAWrongBatchEndsTheRunOnAllAndNoLater) {
  on_devices(made(spec_of(4, 64, 32)), 2, combined_by(CombineBy::kAllReduce), [](Rank& rank) {
    Batch wrong = rank.batch.spec;
    if (rank.exchange.rank() == 1) wrong.hidden = nullptr;
    EXPECT_EQ(
        rank.layer.run(wrong, rank.workspace.data(), rank.workspace_bytes, rank.stream).message(),
        "rank 1: hidden: expected a pointer, got null");
    const auto run = [&] { return rank.run(0, 4); };
    EXPECT_OK(run());
    ASSERT_OK(rank.exchange.barrier());  // the other rank's sum has finished
    const Status mixed = rank.exchange.rank() == 0 ? Graph(rank.stream, run).status() : run();
    EXPECT_EQ(mixed.message(),
              "stream of rank 1: expected one that is captured, as on rank 0, got one that is not");
    ASSERT_OK(rank.exchange.barrier());
    EXPECT_OK(run());
    ASSERT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
    ASSERT_OK(rank.exchange.barrier());
    // After an error in NCCL, every later run reports it.
    rank.exchange.device()->abort(Status(Code::kIo, "nccl: a cable was pulled"));
    EXPECT_EQ(run().message(), "nccl: a cable was pulled");
  });
}

// NCCL itself, as far as there are GPUs: eagerly, and in a graph for a world of one rank.
class CudaRanksOverNccl : public testing::Test {
 protected:
  void SetUp() override {
    const auto device = device_facts("cuda:0");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    if (emulated()) GTEST_SKIP() << "the emulator of CUDA has no NCCL but its double";
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) GTEST_SKIP() << "libnccl.so.2 is not on this host's library path";
  }
  static std::vector<int> worlds() {
    std::vector<int> worlds;
    for (int world = 1; world <= std::min(gpus(), 6); ++world) worlds.push_back(world);
    return worlds;
  }
};

TEST_F(CudaRanksOverNccl, AllReduceIsTheSumInTheOrderOfTheRanks) {
  for (const int world : worlds())
    check_reduce(made(spec_of(9, 64, 32)), *Placement::contiguous(6, world), 2);
  Case large = spec_of(130, 2048, 16);
  large.options.top_k = 1;
  for (const int world : worlds()) check_reduce(made(large), *Placement::contiguous(6, world), 1);
}

TEST_F(CudaRanksOverNccl, ARunIsCapturedAndReplayed) {
  const CaseData data = made(spec_of(9, 64, 32));
  const std::vector<uint8_t> expected = expected_sum(data, *Placement::contiguous(6, 1));
  on_devices(data, 1, combined_by(CombineBy::kAllReduce), [&](Rank& rank) {
    ASSERT_OK(rank.run(0, 9));  // a graph cannot load what a first call loads
    rank.out();
    const Replay replay(rank, 0, 9);
    ASSERT_OK(replay.status());
    for (int i = 0; i < 3; ++i)
      EXPECT_EQ(difference_of(data, expected, replay.run(data)), "") << "replay " << i;
  });
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
