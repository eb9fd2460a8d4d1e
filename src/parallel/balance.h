// Balance: computes, from how often each expert was chosen, a placement that gives ranks equal
// load.
#pragma once

#include <cstdint>
#include <span>

#include "parallel/placement.h"

namespace nvfp4_moe::internal {

// The load of the busiest rank divided by the mean, if an expert's load is split evenly among its
// slots: 1 is even, world means that one rank has all of it. 1 without any load. load: (experts)
// assignments.
double imbalance(std::span<const uint64_t> load, const Placement& placement);

// A placement with slots_per_rank slots on each of `world` ranks.
//   1. Each expert gets one slot. The redundant slots go, one by one, to the expert with the most
//      load per slot.
//   2. Slots go to ranks, heaviest first, each to the rank with the least load that does not hold
//      that expert.
//   3. Slots are swapped in pairs while that makes the heavier of two ranks lighter.
//
// Returns the most even of several such placements; some replicate fewer experts or deal them out
// round-robin. load: (experts); an expert with load 0 still gets a slot. A pure function of its
// arguments, so all ranks with the same load propose the same placement. kInvalidArgument if the
// slots cannot hold every expert once, or would hold one twice on a rank.
Result<Placement> propose_placement(std::span<const uint64_t> load, int world,
                                    int64_t slots_per_rank);

}  // namespace nvfp4_moe::internal
