// Balance: from how often each expert was chosen to a placement under which ranks have equally much
// to do.
#pragma once

#include <cstdint>
#include <span>

#include "parallel/placement.h"

namespace nvfp4_moe::internal {

// The load of the busiest rank over an even share, if an expert's load is divided evenly among its
// slots: 1 is even, world is all on one rank. 1 without any load. load: (experts) assignments.
double imbalance(std::span<const uint64_t> load, const Placement& placement);

// A placement with slots_per_rank slots on each of `world` ranks.
//   1. Slots in excess of one for each expert go, one by one, to the expert with the most load for
//      each of its slots.
//   2. Slots go to ranks, the heaviest first, each to the rank with the least load that has none of
//      that expert.
//   3. Slots are exchanged in pairs while that makes the heavier of two ranks lighter.
// The result is the most even of several such placements, some of which divide fewer experts or
// deal them out in turn. load: (experts); an expert that nobody chose still has a slot. A pure
// function of its arguments: all ranks that have the same load propose the same. kInvalidArgument
// if the slots do not hold every expert once, or hold one twice on a rank.
Result<Placement> propose_placement(std::span<const uint64_t> load, int world,
                                    int64_t slots_per_rank);

}  // namespace nvfp4_moe::internal
