// Results of `bench --ep`, and their table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/bench/timed_ranks.h"
#include "cli/console/table.h"

namespace nvfp4_moe::internal::cli {

inline constexpr const char* kOneRank = "one_rank";
inline constexpr const char* kOwnExperts = "own_experts";

struct RanksCell {
  std::string backend;
  std::string activation_format;
  std::string combine;    // or kOneRank, the same layer without an exchange, or kOwnExperts
  std::string over;       // how devices are connected; empty without devices or an exchange
  std::string placement;  // "contiguous" or "balanced"; empty for one rank
  int64_t tokens = 0;     // of all ranks together
  std::string routing;
  double busiest = 1;  // the busiest rank's assignments over an even division
  bool on_device = false;
  // ranks compute the same as kOwnExperts, so the difference in time is the exchange's
  bool same_work = false;
  std::vector<RanksRound> rounds;  // without transfers for one rank
};

// Whether p90 of a round is more than 1.5 times its fastest run.
bool is_noisy(const RanksCell& cell);
// One row per cell. "times one rank" is relative to the cell of kOneRank with the same backend,
// format, tokens and routing. "exchange us" is the difference, round by round, to the cell of
// kOwnExperts that also has the same placement.
Table ranks_table(const std::vector<RanksCell>& cells);

}  // namespace nvfp4_moe::internal::cli
