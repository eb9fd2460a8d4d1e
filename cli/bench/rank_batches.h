// Batches of a layer over ranks, by how evenly their tokens' experts lie on the ranks.
#pragma once

#include <array>
#include <cstdint>

#include "cli/bench/timed_layer.h"
#include "core/enum_names.h"
#include "exchange/placement.h"

namespace nvfp4_moe::cli {

enum class RankRouting : uint8_t {
  kUniform,  // every expert alike
  kZipf,     // the r-th most popular expert with weight 1 / r, in an order of the seed's; a token's are distinct
  kHot,      // the experts of rank 0 alone, alike
};

// cold_batches of such a routing; under kZipf popular experts are as warm as they are in use.
ColdBatches rank_batches(const MoeOptions& options, const Placement& placement, RankRouting routing, int64_t tokens,
                         uint64_t seed, size_t copies);

// Assignments to the busiest rank's experts over an even division, mean of the batches.
double busiest_over_even(const ColdBatches& batches, const Placement& placement);

}  // namespace nvfp4_moe::cli

namespace nvfp4_moe {
template <>
struct EnumNames<cli::RankRouting> {
  static constexpr const char* kWhat = "routing";
  static constexpr std::array kAll = {"uniform", "zipf", "hot"};
};
}  // namespace nvfp4_moe
