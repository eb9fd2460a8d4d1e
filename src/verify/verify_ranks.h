// verify over ranks: checks that a layer that several ranks share gives the result of one rank with
// all experts.
//
// Layer by layer, every rank opens its experts of the checkpoint and runs its tokens (all_to_all)
// or all of them (all_reduce). Rank 0 collects the outputs, runs the whole layer by itself on the
// same backend, and compares:
// - all_to_all has to give the same bits, except for bf16 activations, whose sums may be in another
//   order (docs/explanation/numerics.md).
// - For bf16 activations, and under all_reduce, judge/judge.h's limits hold.
// - On devices, the number of rows may change how sums are split. So all_to_all runs there as
//   batch_invariant in every format, and has to give the same bits.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_options.h"
#include "exchange/local_ranks.h"
#include "judge/judge.h"
#include "parallel/open.h"
#include "verify/states.h"

namespace nvfp4_moe::internal {

struct RanksOptions {
  CombineBy combine = CombineBy::kAllToAll;
  CheckpointOptions reading;
  std::vector<int64_t> layers;
  StatesOptions states;
  std::string backend = "auto";
  std::function<std::string(int index)>
      device;       // one for each rank of this process; empty: cpu. The exchange must support it.
  int threads = 0;  // of each rank; 0: one per core, divided among the ranks of this process
  std::function<void(MoeOptions&)> adjust;  // as in VerifyOptions
  bool choose_format = true;                // as in VerifyOptions
  ProgressFn progress;  // what = "load"; counts the experts of all ranks of this process
};

struct RanksCheck {
  int64_t layer = 0;
  std::string backend;
  int64_t tokens = 0;
  bool batch_invariant = false;  // value used for the run
  bool same_bits = false;
  bool wants_same_bits = false;
  Comparison comparison;
  std::string broken;  // empty if the layer passed
};

// Returns rank 0's checks, one for each layer; empty on the other ranks. A rank that cannot
// continue ends all with its message.
Result<std::vector<RanksCheck>> verify_ranks(const std::string& path, const LocalRanks& ranks,
                                             const RanksOptions& options);

}  // namespace nvfp4_moe::internal
