// Bytes that a rank sends to others over peer memory. No call reports them, so they are computed
// from the batch.
#pragma once

#include <cstdint>

#include "cli/bench/rank_batches.h"
#include "parallel/rank_combine.h"

namespace nvfp4_moe::internal::cli {

// Bytes of one run; all_reduce has only combine.
struct PeerBytes {
  int64_t dispatch = 0, combine = 0;
};
// batch: the tokens of all ranks together.
PeerBytes peer_bytes(const RankCombine& ranks, const RandomTokens& batch);

}  // namespace nvfp4_moe::internal::cli
