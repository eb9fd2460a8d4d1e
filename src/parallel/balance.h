// Balance: computes, from how often each expert was chosen, a placement that gives ranks equal
// load.
#pragma once

#include <cstdint>
#include <span>

#include "parallel/placement.h"

namespace nvfp4_moe::internal {

// The load of the busiest rank divided by the mean, if an expert's load is split evenly among its
// slots. 1 without any load. load: (experts) assignments.
double imbalance(std::span<const uint64_t> load, const Placement& placement);

// A placement with slots_per_rank slots on each of `world` ranks, as even as a search finds.
// load: (experts); an expert with load 0 still gets a slot. A pure function of its arguments, so
// all ranks with the same load propose the same placement. kInvalidArgument if the slots cannot
// hold every expert once, or would hold one twice on a rank.
Result<Placement> propose_placement(std::span<const uint64_t> load, int world,
                                    int64_t slots_per_rank);

}  // namespace nvfp4_moe::internal
