// The compiled configurations of the FP4 GEMMs, as data, and which one a layer uses.
//
// Weights are the M dimension, 128 rows per tile, and activations the N dimension: a tile
// multiplies the rows that it has, in steps of 8. A configuration sets the maximum, and so the
// number of stages that fit into shared memory. It must hold almost every expert's rows in one
// tile, since a second tile reads the expert's weights again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "backend/cuda/fp4_operand.h"
#include "backend/cuda/gemm/split_k_scratch.h"
#include "backend/cuda/packed_tile.h"
#include "core/config.h"

namespace nvfp4_moe::internal::sm100 {

inline constexpr int kMaxSharedBytes = 227 * 1024;  // per cta
inline constexpr int kMaxCtas = 192;  // one per multiprocessor; the largest chip has 160
// k per k-block, which is one stage of the pipeline
inline constexpr int kBlockK = cuda::kFp4KBlock;
inline constexpr int kBlockTiles = kBlockK / cuda::kTileK;

using Scratch = cuda::SplitKScratch<kMaxCtas>;

struct GemmConfig {
  int tile_n;                  // maximum rows of activations per tile
  double max_rows_per_expert;  // used up to this average number
  const char* name;

  // Size of a split-K partial: fp32 accumulators.
  constexpr int64_t partial_bytes() const { return int64_t{cuda::kTileRows} * tile_n * 4; }
};
// The widest leaves room in tensor memory for two tiles' accumulators, 192 columns each, and the
// scales of a k-block.
inline constexpr std::array<GemmConfig, 3> kGemmConfigs = {{
    {8, 2.5, "tcgen05_128x8"},
    {64, 40.0, "tcgen05_128x64"},
    {192, 1e30, "tcgen05_128x192"},
}};

// For bf16 activations, with k-blocks of 128 k: as wide as three stages allow.
inline constexpr int kBf16BlockK = cuda::kTileK;
inline constexpr std::array<GemmConfig, 3> kBf16GemmConfigs = {{
    {16, 5.0, "tcgen05_bf16_128x16"},
    {64, 40.0, "tcgen05_bf16_128x64"},
    {128, 1e30, "tcgen05_bf16_128x128"},
}};

// Tiles may be split along K if K is long enough, and if bits may depend on the batch.
inline bool splits_k(const MoeConfig& config, int64_t k) {
  return !config->batch_invariant && cuda::ceil_div(k, kBlockK) >= 4;
}

// Splitting must save this many k-blocks of the longest run, 18 KiB of weights each: about the
// bytes that pay for it on Hopper (80 KiB). Not measured here.
constexpr int32_t min_saved_k_blocks(const GemmConfig& gemm) { return gemm.tile_n <= 64 ? 4 : 6; }
// The cta that reduces a split tile reads the accumulators of all its splits, which are many if
// tiles are wide.
constexpr int32_t max_splits(const GemmConfig& gemm) { return gemm.tile_n <= 64 ? 1 << 15 : 4; }

// The index in a table of configurations for the routed experts of a batch.
template <const auto& kConfigs>
int routed_config_of(const MoeConfig& config, const ExpertRange&, int64_t tokens) {
  const double rows_per_expert =
      static_cast<double>(tokens * config->top_k) / static_cast<double>(config->num_experts);
  size_t index = 0;
  while (rows_per_expert > kConfigs[index].max_rows_per_expert) ++index;
  return static_cast<int>(index);
}
// The same for the shared expert, whose number of rows is known: the smallest configuration that
// holds them in one tile, or the largest.
template <const auto& kConfigs>
int shared_config_of(int64_t tokens) {
  size_t index = 0;
  while (index + 1 < kConfigs.size() && tokens > kConfigs[index].tile_n) ++index;
  return static_cast<int>(index);
}
inline constexpr auto routed_config = routed_config_of<kGemmConfigs>;
inline constexpr auto shared_config = shared_config_of<kGemmConfigs>;

}  // namespace nvfp4_moe::internal::sm100
