// What a rank sends to others where kernels write into their memory: no call says it, so it is counted from the batch.
#pragma once

#include <cstdint>

#include "cli/bench/rank_batches.h"
#include "parallel/expert_parallel.h"

namespace nvfp4_moe::cli {

// Bytes of one run, there and back; all_reduce has no way there.
struct PeerBytes {
  int64_t dispatch = 0, combine = 0;
};
// batch: of all ranks together.
PeerBytes peer_bytes(const ExpertParallelLayer& layer, const RandomTokens& batch);

}  // namespace nvfp4_moe::cli
