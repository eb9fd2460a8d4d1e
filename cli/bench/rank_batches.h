// Batches of a layer over ranks, by how evenly their tokens' experts lie on the ranks.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cli/bench/timed_layer.h"
#include "core/enum_names.h"
#include "parallel/placement.h"
#include "parallel/rank_combine.h"

namespace nvfp4_moe::internal::cli {

enum class RankRouting : uint8_t {
  kUniform,  // every expert alike
  kZipf,     // the r-th most popular expert with weight 1 / r, in an order of the seed's; a token's
             // are distinct
  kHot,      // the experts of rank 0 alone, alike
};

// cold_batches of such a routing; under kZipf popular experts are as warm as they are in use.
ColdBatches rank_batches(const MoeOptions& options, const Placement& placement, RankRouting routing,
                         int64_t tokens, uint64_t seed, size_t copies);

// The first of `rank`'s tokens, which follow each other, of `tokens` of all ranks.
inline int64_t first_token(int64_t tokens, int rank, int world) { return rank * tokens / world; }
// (tokens, top_k) the slots that a layer so divided takes for a batch's ids: those of an expert
// take turns, which all ranks count alike under all_reduce, and each for its own tokens under
// all_to_all, from its own number on.
std::vector<int32_t> slots_of(const RandomTokens& batch, int64_t top_k, const Placement& placement,
                              CombineBy combine);

// Assignments to the busiest rank's slots over an even division, mean of the batches.
double busiest_over_even(const ColdBatches& batches, int64_t top_k, const Placement& placement,
                         CombineBy combine);
// (batches) the rank that has most to do in each, the lowest of several: an expert costs its rows,
// and where it has few of them its weights' read. Tells whose time counts where ranks are timed
// apart.
std::vector<int> busiest_ranks(const ColdBatches& batches, int64_t top_k,
                               const Placement& placement, CombineBy combine);
// (num_experts) assignments of all batches: what a placement is proposed from.
std::vector<uint64_t> load_of(const ColdBatches& batches, int64_t num_experts);

}  // namespace nvfp4_moe::internal::cli

namespace nvfp4_moe::internal {
template <>
struct EnumNames<cli::RankRouting> {
  static constexpr const char* kWhat = "routing";
  static constexpr std::array kAll = {"uniform", "zipf", "hot"};
};
}  // namespace nvfp4_moe::internal
