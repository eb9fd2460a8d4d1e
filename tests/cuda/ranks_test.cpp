// A layer over ranks on a GPU: all_reduce against the sum of what the ranks' layers give one by one, bit for bit, over
// NCCL's double (tests/exchange/fake_nccl), whose ranks are threads on the one device of the emulator of CUDA.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/float_formats.h"
#include "cuda/ranks_case.h"

namespace nvfp4_moe {
namespace {

using test::device_options;
using test::DeviceBatch;
using test::kFakeNccl;
using test::made;
using test::on_ranks;
using test::OnDevice;
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

// What the ranks' experts add, each rank's as a layer of its own, summed on the host in the order of the ranks.
std::vector<uint16_t> expected_sum(const CaseData& data, const Placement& placement) {
  std::vector<float> sums;
  for (int rank = 0; rank < placement.world(); ++rank) {
    CaseData mine = data;
    // Slots take turns by the assignment's number.
    for (int64_t token = 0; token < data.spec.tokens; ++token)
      for (int64_t k = 0; k < data.spec.options.top_k; ++k) {
        const int64_t id = data.id(token, k), turn = token * data.spec.options.top_k + k;
        if (id < 0 || id >= placement.num_experts()) continue;
        const int64_t slot = placement.slot_of(id, turn);
        mine.set_id(token, k, placement.rank_of(slot) == rank ? id : -1);
      }
    const LayerSource source = test::source_of(data);
    const auto layer = MoeLayer::open(data.config, source, device_options(data));
    EXPECT_OK(layer);
    DeviceBatch batch(mine);
    const OnDevice<float> out(static_cast<size_t>(data.spec.tokens * data.spec.options.hidden_size));
    batch.spec.out = out.data();
    batch.spec.out_dtype = DType::kF32;
    const OnDevice<uint8_t> workspace((*layer)->workspace_bytes());
    EXPECT_OK((*layer)->run(batch.spec, workspace.data(), (*layer)->workspace_bytes()));
    const std::vector<float> part = out.back();
    sums.resize(part.size());
    for (size_t i = 0; i < part.size(); ++i) sums[i] = rank == 0 ? part[i] : sums[i] + part[i];
  }
  std::vector<uint16_t> rounded;
  for (const float sum : sums) rounded.push_back(bf16_from_float(sum));
  return rounded;
}

// over: what a layer says of its NCCL.
void check_reduce(const CaseData& data, const Placement& placement, int calls, const std::string& library = kFakeNccl,
                  const std::string& over = "nccl 2.28.9\"") {
  const std::vector<uint16_t> expected = expected_sum(data, placement);
  std::vector<uint64_t> load(static_cast<size_t>(data.spec.options.num_experts));
  for (int64_t token = 0; token < data.spec.tokens; ++token)
    for (int64_t k = 0; k < data.spec.options.top_k; ++k)
      if (const int64_t id = data.id(token, k); id >= 0 && id < data.spec.options.num_experts)
        ++load[static_cast<size_t>(id)];
  on_ranks(Over::kThreads, placement.world(), test::kCaseTimeout, [&](Exchange& exchange) {
    ASSERT_OK(use_nccl(exchange, "cuda:0", library));
    const std::shared_ptr<Exchange> borrowed(&exchange, [](Exchange*) {});
    const LayerSource source = test::source_of(data);
    ExpertParallelOptions options;
    options.combine = CombineBy::kAllReduce;
    options.placement = placement;
    const auto layer = ExpertParallelLayer::open(data.config, source, device_options(data), options, borrowed);
    ASSERT_OK(layer);
    EXPECT_THAT((*layer)->describe_json(), HasSubstr("\"over\":\"" + over));
    DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes(data.spec.tokens);
    const OnDevice<uint8_t> workspace(bytes);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    for (int call = 0; call < calls; ++call) ASSERT_OK((*layer)->run(batch.spec, workspace.data(), bytes, stream));
    const auto status = (*layer)->status(workspace.data(), bytes, stream);
    ASSERT_OK(status);
    EXPECT_EQ(status->nonfinite_outputs, 0u);
    const std::vector<uint8_t> out = batch.out.back();
    ASSERT_EQ(out.size(), expected.size() * 2);
    EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size()), 0) << "rank " << exchange.rank();
    std::vector<uint64_t> of_all_calls = load;
    for (uint64_t& count : of_all_calls) count *= static_cast<uint64_t>(calls);
    const auto counted = (*layer)->gather_load();
    ASSERT_OK(counted);
    EXPECT_EQ(*counted, of_all_calls);
    ASSERT_OK((*layer)->reset_load());
    EXPECT_EQ(*(*layer)->load(), std::vector<uint64_t>(load.size()));
    ASSERT_OK(exchange.barrier());
    cudaStreamDestroy(stream);
  });
}

TEST_F(CudaRanks, AllReduceIsTheSumInTheOrderOfTheRanks) {
  const CaseData data = made(spec_of(9, 64, 32));
  for (const int world : {1, 3}) check_reduce(data, *Placement::contiguous(6, world), 2);
  check_reduce(data, *Placement::round_robin(6, 2), 2);
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
    const std::shared_ptr<Exchange> borrowed(&exchange, [](Exchange*) {});
    const LayerSource source = test::source_of(data);
    ExpertParallelOptions options;
    const auto open = [&] {
      return ExpertParallelLayer::open(data.config, source, device_options(data), options, borrowed).status().message();
    };
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
    const std::shared_ptr<Exchange> borrowed(&exchange, [](Exchange*) {});
    const LayerSource source = test::source_of(data);
    ExpertParallelOptions options;
    options.combine = CombineBy::kAllReduce;
    const auto layer = ExpertParallelLayer::open(data.config, source, device_options(data), options, borrowed);
    ASSERT_OK(layer);
    DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes();
    const OnDevice<uint8_t> workspace(bytes);
    Batch wrong = batch.spec;
    if (exchange.rank() == 1) wrong.hidden = nullptr;
    EXPECT_EQ((*layer)->run(wrong, workspace.data(), bytes).message(), "rank 1: hidden: expected a pointer, got null");
    EXPECT_OK((*layer)->run(batch.spec, workspace.data(), bytes));
    ASSERT_OK(exchange.barrier());  // the other rank's sum is done
    // Once NCCL has failed, every later run says why.
    exchange.device()->abort(Status(Code::kIo, "nccl: a cable was pulled"));
    EXPECT_EQ((*layer)->run(batch.spec, workspace.data(), bytes).message(), "nccl: a cable was pulled");
    EXPECT_OK(exchange.barrier());
  });
}

// NCCL itself as far as one GPU goes: a world of one rank, eagerly and in a graph.
class CudaRanksOverNccl : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto device = device_facts("cuda:0");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    if (test::emulated()) GTEST_SKIP() << "the emulator of CUDA has no NCCL but its double";
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) GTEST_SKIP() << "libnccl.so.2 is not on this host's library path";
  }
};

TEST_F(CudaRanksOverNccl, AWorldOfOneRankAddsNothing) {
  check_reduce(made(spec_of(9, 64, 32)), *Placement::contiguous(6, 1), 2, "", "nccl ");
  Case large = spec_of(130, 2048, 16);
  large.options.top_k = 1;
  check_reduce(made(large), *Placement::contiguous(6, 1), 1, "", "nccl ");
}

TEST_F(CudaRanksOverNccl, ARunIsCapturedAndReplayed) {
  const CaseData data = made(spec_of(9, 64, 32));
  const std::vector<uint16_t> expected = expected_sum(data, *Placement::contiguous(6, 1));
  on_ranks(Over::kThreads, 1, test::kCaseTimeout, [&](Exchange& exchange) {
    ASSERT_OK(use_nccl(exchange, "cuda:0"));
    const std::shared_ptr<Exchange> borrowed(&exchange, [](Exchange*) {});
    const LayerSource source = test::source_of(data);
    ExpertParallelOptions options;
    options.combine = CombineBy::kAllReduce;
    const auto layer = ExpertParallelLayer::open(data.config, source, device_options(data), options, borrowed);
    ASSERT_OK(layer);
    DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes(data.spec.tokens);
    const OnDevice<uint8_t> workspace(bytes);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_OK((*layer)->run(batch.spec, workspace.data(), bytes, stream));  // what a first call loads, no graph can
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    const Status captured = (*layer)->run(batch.spec, workspace.data(), bytes, stream);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_OK(captured);
    ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(cudaMemsetAsync(batch.out.data(), 0xFF, expected.size() * 2, stream), cudaSuccess);
      ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      const std::vector<uint8_t> out = batch.out.back();
      EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size()), 0) << "replay " << i;
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  });
}

}  // namespace
}  // namespace nvfp4_moe
