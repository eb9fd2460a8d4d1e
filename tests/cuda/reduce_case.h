// all_reduce over ranks with devices, and the check against what the ranks' layers give one by one.
#pragma once

#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "core/float_formats.h"
#include "cuda/ranks_case.h"

namespace nvfp4_moe::test {

// What the ranks' experts add, each rank's as a layer of its own, summed on the host in the order of the ranks.
inline std::vector<uint16_t> expected_sum(const CaseData& data, const Placement& placement) {
  std::vector<float> sums;
  for (int rank = 0; rank < placement.world(); ++rank) {
    CaseData mine = data;
    for (int64_t token = 0; token < data.spec.tokens; ++token)
      for (int64_t k = 0; k < data.spec.options.top_k; ++k) {
        const int64_t id = data.id(token, k);
        if (id < 0 || id >= placement.num_experts()) continue;
        const int64_t slot = placement.slot_of(id, turn_of(0, token, k));
        mine.set_id(token, k, placement.rank_of(slot) == rank ? id : -1);
      }
    const LayerSource source = source_of(data);
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

inline void check_reduce(const CaseData& data, const Placement& placement, int calls,
                         Between between = Between::kNccl) {
  const std::vector<uint16_t> expected = expected_sum(data, placement);
  std::vector<uint64_t> load(static_cast<size_t>(data.spec.options.num_experts));
  for (int64_t token = 0; token < data.spec.tokens; ++token)
    for (int64_t k = 0; k < data.spec.options.top_k; ++k)
      if (const int64_t id = data.id(token, k); id >= 0 && id < data.spec.options.num_experts)
        ++load[static_cast<size_t>(id)];
  on_ranks(Over::kThreads, placement.world(), kCaseTimeout, [&](Exchange& exchange) {
    ASSERT_EQ(cudaSetDevice(device_of(exchange.rank())), cudaSuccess);
    ASSERT_OK(connect_devices(exchange, between));
    ExpertParallelOptions options;
    options.combine = CombineBy::kAllReduce;
    options.placement = placement;
    const auto layer = open_on_device(exchange, data, options);
    ASSERT_OK(layer);
    EXPECT_THAT((*layer)->describe_json(),
                ::testing::HasSubstr(between == Between::kPeers ? "\"over\":\"peers\"" : "\"over\":\"nccl 2."));
    DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes(data.spec.tokens);
    const OnDevice<uint8_t> workspace(bytes);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
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

}  // namespace nvfp4_moe::test
