// all_reduce over ranks with devices, and the check against the ranks' layers, run one by one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/float_formats.h"
#include "cuda/dispatch_case.h"

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
    mine.spec.out_dtype = DType::kF32;
    const std::vector<float> part = to_floats(OneRank(mine).out, DType::kF32);
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

inline void check_reduce(const CaseData& data, const Placement& placement, int calls,
                         Between between = Between::kNccl) {
  const std::vector<uint8_t> expected = expected_sum(data, placement);
  const std::vector<float> values = to_floats(expected, data.spec.out_dtype);
  const auto nonfinite = std::count_if(values.begin(), values.end(),
                                       [](float value) { return !std::isfinite(value); });
  std::vector<uint64_t> load(static_cast<size_t>(data.spec.options.num_experts));
  for (int64_t token = 0; token < data.spec.tokens; ++token)
    for (int64_t k = 0; k < data.spec.options.top_k; ++k)
      if (const int64_t id = data.id(token, k); id >= 0 && id < data.spec.options.num_experts)
        load[static_cast<size_t>(id)] += static_cast<uint64_t>(calls);
  const ExpertParallelOptions options{.combine = CombineBy::kAllReduce, .placement = placement};
  on_devices(
      data, placement.world(), options,
      [&](Rank& rank) {
        EXPECT_THAT(
            rank.layer.describe_json(),
            HasSubstr(between == Between::kPeers ? "\"over\":\"peers\"" : "\"over\":\"nccl 2."));
        for (int call = 0; call < calls; ++call) ASSERT_OK(rank.run(0, data.spec.tokens));
        EXPECT_EQ(must(rank.status())->nonfinite_outputs, static_cast<uint64_t>(nonfinite));
        EXPECT_EQ(difference_of(data, expected, rank.out()), "") << "rank " << rank.exchange.rank();
        EXPECT_EQ(*must(ranks_of(rank.layer).expert_load()), load);
        ASSERT_OK(ranks_of(rank.layer).reset_expert_load());
        EXPECT_EQ(*ranks_of(rank.layer).local_expert_load(), std::vector<uint64_t>(load.size()));
        ASSERT_OK(rank.exchange.barrier());
      },
      between);
}

}  // namespace nvfp4_moe::internal::test
