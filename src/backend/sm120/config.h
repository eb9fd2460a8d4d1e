// The compiled configurations of the FP4 GEMMs, as data, and which one a layer uses.
//
// Weights are the M dimension, 128 rows per tile, and activations the N dimension, in steps of 8. A
// configuration must hold almost every expert's rows in one tile, since a second tile reads the
// expert's weights again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "backend/cuda/fp4_operand.h"
#include "backend/cuda/gemm/split_k_scratch.h"
#include "backend/cuda/packed_tile.h"
#include "core/config.h"

namespace nvfp4_moe::internal::sm120 {

inline constexpr int kMaxSharedBytes = 99 * 1024;  // per cta
inline constexpr int kMaxCtas = 192;  // one per multiprocessor; the largest chip has 188
inline constexpr int kConsumerWarps = 8;
// k per k-block, which is one stage of the pipeline
inline constexpr int kBlockK = cuda::kFp4KBlock;
inline constexpr int kBlockTiles = kBlockK / cuda::kTileK;

using Scratch = cuda::SplitKScratch<kMaxCtas>;

struct GemmConfig {
  int tile_n;                  // maximum rows of activations per tile
  int warps_n;                 // consumer warps side by side along N; the others are along M
  double max_rows_per_expert;  // used up to this average number
  const char* name;

  // Size of a split-K partial: fp32 accumulators.
  constexpr int64_t partial_bytes() const { return int64_t{cuda::kTileRows} * tile_n * 4; }
};
inline constexpr std::array<GemmConfig, 3> kGemmConfigs = {{
    {8, 1, 2.5, "fp4_128x8"},
    {32, 1, 19.0, "fp4_128x32"},
    {128, 2, 1e30, "fp4_128x128"},
}};

// Tiles may be split along K if K is long enough, and if bits may depend on the batch.
inline bool splits_k(const MoeConfig& config, int64_t k) {
  return !config->batch_invariant && cuda::ceil_div(k, kBlockK) >= 2;
}

// Splitting must save this many k-blocks of the longest run, 18 KiB of weights each. Calculated,
// not measured: the reduction has about 3 us of latency, in which a multiprocessor reads two
// k-blocks or multiplies three wide ones.
constexpr int32_t min_saved_k_blocks(const GemmConfig& gemm) { return gemm.tile_n <= 32 ? 2 : 3; }
// The cta that reduces a split tile reads the accumulators of all its splits, which are many if
// tiles are wide.
constexpr int32_t max_splits(const GemmConfig& gemm) { return gemm.tile_n <= 32 ? 1 << 15 : 4; }

// The index in kGemmConfigs for the routed experts of a batch.
inline int routed_config(const MoeConfig& config, const ExpertRange&, int64_t tokens) {
  const double rows_per_expert =
      static_cast<double>(tokens * config->top_k) / static_cast<double>(config->num_experts);
  size_t index = 0;
  while (rows_per_expert > kGemmConfigs[index].max_rows_per_expert) ++index;
  return static_cast<int>(index);
}
// The same for the shared expert, whose number of rows is known: the smallest configuration that
// holds them in one tile, or the largest.
inline int shared_config(int64_t tokens) {
  size_t index = 0;
  while (index + 1 < kGemmConfigs.size() && tokens > kGemmConfigs[index].tile_n) ++index;
  return static_cast<int>(index);
}

}  // namespace nvfp4_moe::internal::sm120
