// A layer over ranks on a GPU: all_reduce against the sum of what the ranks' layers give one by one, bit for bit, over
// NCCL's double (tests/exchange/fake_nccl), whose ranks are threads on the one device of the emulator of CUDA.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/graph.h"
#include "cuda/reduce_case.h"

namespace nvfp4_moe::internal {
namespace {

using test::check_reduce;
using test::DeviceBatch;
using test::expected_sum;
using test::Graph;
using test::kFakeNccl;
using test::made;
using test::on_ranks;
using test::OnDevice;
using test::open_on_device;
using test::Over;
using test::spec_of;
using ::testing::Each;
using ::testing::HasSubstr;

class CudaRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto device = device_facts("cuda:0");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    if (!test::emulated()) GTEST_SKIP() << "NCCL's double reaches the emulator's memory alone";
  }
};

TEST_F(CudaRanks, AllReduceIsTheSumInTheOrderOfTheRanks) {
  const CaseData data = made(spec_of(9, 64, 32));
  for (const int world : {1, 3}) check_reduce(data, *Placement::contiguous(6, world), 2);
  check_reduce(data, test::round_robin(6, 2), 2);
  check_reduce(data, test::redundant(6, 3), 2);
}

// More than a MiB of sums: shard by shard, of which three ranks have no equal number.
TEST_F(CudaRanks, LargeSumsAreAddedInShards) {
  Case spec = spec_of(130, 2048, 16);
  spec.options.top_k = 1;
  check_reduce(made(spec), *Placement::contiguous(6, 3), 1);
}

TEST_F(CudaRanks, WhatADeviceDoesNotRunIsRefusedByNameOnEveryRank) {
  const CaseData data = made(spec_of(4, 64, 32));
  on_ranks(Over::kThreads, 2, test::kCaseTimeout, [&](Exchange& exchange) {
    ExpertParallelOptions options;
    const auto open = [&] { return open_on_device(exchange, data, options).status().message(); };
    for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce}) {
      options.combine = combine;
      EXPECT_THAT(open(), HasSubstr("rank 0: device: expected cpu for a layer over an exchange without NCCL"));
    }
    EXPECT_THAT(use_nccl(exchange, "cpu").message(), HasSubstr("rank 0: nccl: expected a device cuda:N, got cpu"));
    EXPECT_THAT(use_nccl(exchange, "cuda:9", kFakeNccl).message(), HasSubstr("rank 0: device cuda:9"));
    EXPECT_OK(exchange.barrier());
  });
}

// A rank that cannot run says so before anything is enqueued, and the next run goes on.
TEST_F(CudaRanks, ARankWithAWrongBatchEndsTheRunOnAllAndNoLater) {
  const CaseData data = made(spec_of(4, 64, 32));
  on_ranks(Over::kThreads, 2, test::kCaseTimeout, [&](Exchange& exchange) {
    ASSERT_OK(use_nccl(exchange, "cuda:0", kFakeNccl));
    ExpertParallelOptions options;
    options.combine = CombineBy::kAllReduce;
    const auto layer = open_on_device(exchange, data, options);
    ASSERT_OK(layer);
    DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes();
    const OnDevice<uint8_t> workspace(bytes);
    Batch wrong = batch.spec;
    if (exchange.rank() == 1) wrong.hidden = nullptr;
    EXPECT_EQ((*layer)->run(wrong, workspace.data(), bytes).message(), "rank 1: hidden: expected a pointer, got null");
    EXPECT_OK((*layer)->run(batch.spec, workspace.data(), bytes));
    ASSERT_OK(exchange.barrier());  // the other rank's sum is done
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    const auto run = [&] { return (*layer)->run(batch.spec, workspace.data(), bytes, stream); };
    const Status mixed = exchange.rank() == 0 ? Graph(stream, run).status() : run();
    EXPECT_EQ(mixed.message(), "stream of rank 1: expected one that is captured, as on rank 0, got one that is not");
    ASSERT_OK(exchange.barrier());
    EXPECT_OK(run());
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    cudaStreamDestroy(stream);
    ASSERT_OK(exchange.barrier());
    // Once NCCL has failed, every later run says why.
    exchange.device()->abort(Status(Code::kIo, "nccl: a cable was pulled"));
    EXPECT_EQ((*layer)->run(batch.spec, workspace.data(), bytes).message(), "nccl: a cable was pulled");
    EXPECT_OK(exchange.barrier());
  });
}

// NCCL itself, as far as there are GPUs: eagerly, and a world of one rank in a graph.
class CudaRanksOverNccl : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto device = device_facts("cuda:0");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    if (test::emulated()) GTEST_SKIP() << "the emulator of CUDA has no NCCL but its double";
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) GTEST_SKIP() << "libnccl.so.2 is not on this host's library path";
  }
  static std::vector<int> worlds() {
    std::vector<int> worlds;
    for (int world = 1; world <= std::min(test::gpus(), 6); ++world) worlds.push_back(world);
    return worlds;
  }
};

TEST_F(CudaRanksOverNccl, AllReduceIsTheSumInTheOrderOfTheRanks) {
  for (const int world : worlds()) check_reduce(made(spec_of(9, 64, 32)), *Placement::contiguous(6, world), 2);
  Case large = spec_of(130, 2048, 16);
  large.options.top_k = 1;
  for (const int world : worlds()) check_reduce(made(large), *Placement::contiguous(6, world), 1);
}

TEST_F(CudaRanksOverNccl, ARunIsCapturedAndReplayed) {
  const CaseData data = made(spec_of(9, 64, 32));
  const std::vector<uint8_t> expected = expected_sum(data, *Placement::contiguous(6, 1));
  on_ranks(Over::kThreads, 1, test::kCaseTimeout, [&](Exchange& exchange) {
    ASSERT_OK(use_nccl(exchange, "cuda:0"));
    ExpertParallelOptions options;
    options.combine = CombineBy::kAllReduce;
    const auto layer = open_on_device(exchange, data, options);
    ASSERT_OK(layer);
    DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes(data.spec.tokens);
    const OnDevice<uint8_t> workspace(bytes);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    const auto run = [&] { return (*layer)->run(batch.spec, workspace.data(), bytes, stream); };
    ASSERT_OK(run());  // what a first call loads, no graph can
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const Graph graph(stream, run);
    ASSERT_OK(graph.status());
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(cudaMemsetAsync(batch.out.data(), 0xFF, expected.size(), stream), cudaSuccess);
      graph.launch();
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      const std::vector<uint8_t> out = batch.out.back();
      EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size()), 0) << "replay " << i;
    }
    cudaStreamDestroy(stream);
  });
}

}  // namespace
}  // namespace nvfp4_moe::internal
