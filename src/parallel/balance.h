// Balance: from how often each expert was chosen to a placement under which ranks have equally much to do.
#pragma once

#include <cstdint>
#include <span>

#include "parallel/placement.h"

namespace nvfp4_moe {

// The most that a rank gets over what each would get of an even division, an expert's load being divided evenly among
// its slots: 1 is even, world is all on one rank. 1 where there is no load. load: (experts) assignments.
double imbalance(std::span<const uint64_t> load, const Placement& placement);

// A placement with slots_per_rank slots on each of `world` ranks: slots beyond one an expert go, one by one, to whichever
// expert has the most load a slot; then slots go to ranks, the heaviest first, each to the rank with the least load that
// has none of that expert; then slots are exchanged in pairs while that makes the heavier of two ranks lighter. The most
// even of several such, which divide fewer experts or deal them out in turn.
// load: (experts); an expert nobody chose has a slot all the same. A pure function of its arguments: all ranks that have
// the same load propose the same. kInvalidArgument where the slots do not hold every expert once, or hold one twice on a
// rank.
Result<Placement> propose_placement(std::span<const uint64_t> load, int world, int64_t slots_per_rank);

}  // namespace nvfp4_moe
