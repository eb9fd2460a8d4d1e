// all_reduce over ranks with devices, and the check against the ranks' layers, run one by one.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <string>
#include <vector>

#include "core/float_formats.h"
#include "cuda/dispatch_case.h"
#include "cuda/ranks_case.h"

namespace nvfp4_moe::internal::test {

// The sum that the ranks should compute: each rank's experts run as a separate layer, and the host
// adds the results in the order of the ranks and rounds to out's dtype. Rank 0 has the shared
// expert.
inline std::vector<uint8_t> expected_sum(const CaseData& data, const Placement& placement) {
  std::vector<float> sums;
  for (int rank = 0; rank < placement.world(); ++rank) {
    CaseData mine = data;
    if (rank > 0) {
      mine.spec.options.shared_intermediate_size = 0;
      mine.spec.shared_weights = false;
      mine.shared_weights.clear();
      mine.config = *must(MoeConfig::make(mine.spec.options));
    }
    for (int64_t token = 0; token < data.spec.tokens; ++token)
      for (int64_t k = 0; k < data.spec.options.top_k; ++k) {
        const int64_t id = data.id(token, k);
        if (id < 0 || id >= placement.num_experts()) continue;
        const int64_t slot = placement.slot_of(id, turn_of(0, token, k));
        mine.set_id(token, k, placement.rank_of(slot) == rank ? id : -1);
      }
    const LayerSource source = source_of(mine);
    const auto layer = must(MoeLayer::open(mine.config, source, device_options(mine)));
    DeviceBatch batch(mine);
    const OnDevice<float, 16> out(
        static_cast<size_t>(data.spec.tokens * data.spec.options.hidden_size));
    batch.spec.out = out.data();
    batch.spec.out_dtype = DType::kF32;
    const OnDevice<uint8_t, 16> workspace((*layer)->workspace_bytes());
    EXPECT_OK((*layer)->run(batch.spec, workspace.data(), (*layer)->workspace_bytes()));
    const std::vector<float> part = out.back();
    sums.resize(part.size());
    for (size_t i = 0; i < part.size(); ++i) sums[i] = rank == 0 ? part[i] : sums[i] + part[i];
  }
  const DType dtype = data.spec.out_dtype;
  const size_t width = static_cast<size_t>(bits(dtype) / 8);
  std::vector<uint8_t> out(sums.size() * width);
  for (size_t i = 0; i < sums.size(); ++i) {
    const uint16_t half =
        dtype == DType::kF16 ? fp16_from_float(sums[i]) : bf16_from_float(sums[i]);
    std::memcpy(out.data() + i * width,
                dtype == DType::kF32 ? static_cast<const void*>(&sums[i]) : &half, width);
  }
  return out;
}

inline uint64_t count_nonfinite(const std::vector<uint8_t>& values, DType dtype) {
  const size_t width = static_cast<size_t>(bits(dtype) / 8);
  uint64_t count = 0;
  for (size_t at = 0; at < values.size(); at += width) {
    uint32_t value = 0;
    std::memcpy(&value, values.data() + at, width);
    const uint32_t infinity = dtype == DType::kF32   ? 0x7F800000u
                              : dtype == DType::kF16 ? 0x7C00u
                                                     : 0x7F80u;
    count += (value & infinity) == infinity;
  }
  return count;
}

inline void check_reduce(const CaseData& data, const Placement& placement, int calls,
                         Between between = Between::kNccl) {
  const std::vector<uint8_t> expected = expected_sum(data, placement);
  const uint64_t nonfinite = count_nonfinite(expected, data.spec.out_dtype);
  std::vector<uint64_t> load(static_cast<size_t>(data.spec.options.num_experts));
  for (int64_t token = 0; token < data.spec.tokens; ++token)
    for (int64_t k = 0; k < data.spec.options.top_k; ++k)
      if (const int64_t id = data.id(token, k); id >= 0 && id < data.spec.options.num_experts)
        ++load[static_cast<size_t>(id)];
  on_ranks(Over::kThreads, placement.world(), kCaseTimeout, [&](Exchange& exchange) {
    ASSERT_EQ(cudaSetDevice(device_of(exchange.rank())), cudaSuccess);
    ASSERT_OK(connect_devices(exchange, between));
    ExpertParallelOptions options{.combine = CombineBy::kAllReduce, .placement = placement};
    const auto layer = must(open_on_device(exchange, data, options));
    EXPECT_THAT(
        (*layer)->describe_json(),
        HasSubstr(between == Between::kPeers ? "\"over\":\"peers\"" : "\"over\":\"nccl 2."));
    DeviceBatch batch(data);
    const size_t bytes = (*layer)->workspace_bytes(data.spec.tokens);
    const OnDevice<uint8_t, 16> workspace(bytes);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (int call = 0; call < calls; ++call)
      ASSERT_OK((*layer)->run(batch.spec, workspace.data(), bytes, stream));
    const auto status = must((*layer)->status(workspace.data(), bytes, stream));
    EXPECT_EQ(status->nonfinite_outputs, nonfinite);
    EXPECT_EQ(difference_of(data, expected, batch.out.back()), "") << "rank " << exchange.rank();
    std::vector<uint64_t> of_all_calls = load;
    for (uint64_t& count : of_all_calls) count *= static_cast<uint64_t>(calls);
    const auto counted = must(ranks_of(**layer).expert_load());
    EXPECT_EQ(*counted, of_all_calls);
    ASSERT_OK(ranks_of(**layer).reset_expert_load());
    EXPECT_EQ(*ranks_of(**layer).local_expert_load(), std::vector<uint64_t>(load.size()));
    ASSERT_OK(exchange.barrier());
    cudaStreamDestroy(stream);
  });
}

}  // namespace nvfp4_moe::internal::test
