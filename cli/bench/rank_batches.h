// Batches of a layer over ranks, with routings that load the ranks more or less evenly.
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
  kUniform,  // every expert is equally likely
  kZipf,     // the r-th most popular expert has weight 1 / r, in an order from the seed; a token's
             // experts are distinct
  kHot,      // only the experts of rank 0, equally likely
};

// cold_batches with such a routing. With kZipf popular experts are as warm in cache as in use.
ColdBatches rank_batches(const MoeOptions& options, const Placement& placement, RankRouting routing,
                         int64_t tokens, uint64_t seed, size_t copies);

// The first token of `rank`, out of `tokens` of all ranks. A rank's tokens are contiguous.
inline int64_t first_token(int64_t tokens, int rank, int world) { return rank * tokens / world; }
// (tokens, top_k) the slots that a layer with this placement uses for a batch's ids. If an expert
// has several slots, assignments go to them in turn. With all_reduce all ranks count together, with
// all_to_all each rank counts its own tokens and begins at its own number.
std::vector<int32_t> slots_of(const RandomTokens& batch, int64_t top_k, const Placement& placement,
                              CombineBy combine);

// Assignments to the busiest rank's slots over an even division, mean of the batches.
double busiest_over_even(const ColdBatches& batches, int64_t top_k, const Placement& placement,
                         CombineBy combine);
// (batches) the rank with the most work in each batch, the lowest of several. An expert costs its
// rows, or reading its weights if it has few rows. If ranks are timed separately, this rank's time
// is the one that counts.
std::vector<int> busiest_ranks(const ColdBatches& batches, int64_t top_k,
                               const Placement& placement, CombineBy combine);
// (num_experts) assignments of all batches, from which a placement is proposed.
std::vector<uint64_t> load_of(const ColdBatches& batches, int64_t num_experts);

// Bytes that a rank sends to others over peer memory in one run of a batch of all ranks' tokens. No
// call reports them, so they are computed. all_reduce has only combine.
struct PeerBytes {
  int64_t dispatch = 0, combine = 0;
};
PeerBytes peer_bytes(const RankCombine& ranks, const RandomTokens& batch);

}  // namespace nvfp4_moe::internal::cli

namespace nvfp4_moe::internal {
template <>
struct EnumNames<cli::RankRouting> {
  static constexpr const char* kWhat = "routing";
  static constexpr std::array kAll = {"uniform", "zipf", "hot"};
};
}  // namespace nvfp4_moe::internal
