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
  std::string over;       // what connects the devices; empty: there are none, or it has no exchange
  std::string placement;  // "contiguous" or "balanced"; empty: of one rank
  int64_t tokens = 0;     // of all ranks together
  std::string routing;
  double busiest = 1;  // rank's assignments over an even division
  bool on_device = false;
  // ranks compute what kOwnExperts does: what it takes more is the exchange's
  bool same_work = false;
  std::vector<RanksRound> rounds;  // of one rank: no transfers
  std::string
      refused;  // why this way to combine has no times; the fields from tokens on say nothing then
};

// Whether p90 of a round is more than 1.5 times its fastest run.
bool is_noisy(const RanksCell& cell);
// A row a cell; "times one rank" is over the cell of kOneRank with the same backend, format, tokens
// and routing, and "exchange us" is round by round what it takes more than the cell of kOwnExperts
// with the same placement besides.
Table ranks_table(const std::vector<RanksCell>& cells);
// One round of a cell, for JSON.
Json ranks_round_json(const RanksCell& cell, size_t round);

}  // namespace nvfp4_moe::internal::cli
