// The compiled configurations of the Hopper GEMMs, as data, and which of them a layer takes.
//
// Weights are the M dimension and activations the N dimension. A tile is tile_m weight rows by up to tile_n rows of
// activations. The host knows how many rows an expert has on average, not how many each has: a configuration must hold
// almost every expert's rows in one tile, since a second tile reads the expert's weights again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/backend.h"
#include "backend/cuda/packed_tile.h"
#include "core/config.h"

namespace nvfp4_moe::sm90 {

inline constexpr int kMaxSharedBytes = 227 * 1024;  // of one cta
inline constexpr int kMaxCtas = 144;                // one a multiprocessor; no Hopper has more

struct GemmConfig {
  int tile_m;                  // weight rows of a tile, a multiple of 128
  int tile_n;                  // rows of activations of a tile, at most: N of the widest wgmma
  int min_n;                   // N of the narrowest wgmma: a tile takes the narrowest that holds its rows
  int n_step;                  // from one wgmma's N to the next, a multiple of 8
  int steps_per_group;         // steps of one wgmma commit group: k16, or k32 under fp8
  double max_rows_per_expert;  // taken up to so many, on average
  bool tma_rows;               // rows come by TMA tensor copies, not by cp.async
  const char* name;
  bool fp8 = false;             // E4M3 times E4M3; else bf16 times bf16
  int consumer_warpgroups = 4;  // that share the weight rows of a tile
  bool ahead = false;           // fragments are made while the products before them run, in registers of their own

  // Accumulators of a split-K partial, fp32.
  constexpr int64_t partial_bytes() const { return int64_t{tile_m} * tile_n * 4; }
  // Whether it is compiled with a producer that routes a small batch by itself.
  constexpr bool fused_routing() const { return tile_n == 8; }
};
// A layer takes them from one of two tables, which are the two parts of this one; a RunPlan has indices into a table.
inline constexpr size_t kBf16Configs = 6, kFp8Configs = 7;
inline constexpr std::array<GemmConfig, kBf16Configs + kFp8Configs> kGemmConfigs = {{
    // The first is taken in place of the second where there is little work: see routed_config.
    {256, 8, 8, 8, 4, 2.5, false, "wgmma_256x8"},
    {512, 8, 8, 8, 2, 2.5, false, "wgmma_512x8"},
    {512, 16, 8, 8, 2, 8.0, false, "wgmma_512x16"},
    {512, 32, 8, 8, 2, 19.0, false, "wgmma_512x32"},
    {256, 64, 24, 8, 4, 50.0, true, "wgmma_256x64"},
    {256, 128, 48, 16, 2, 1e30, true, "wgmma_256x128"},
    // E4M3. The last has as many products as registers allow between two reads of a row from shared memory.
    {256, 8, 8, 8, 2, 2.5, false, "wgmma_fp8_256x8", true},
    {512, 8, 8, 8, 2, 2.5, false, "wgmma_fp8_512x8", true},
    {512, 16, 8, 8, 2, 4.5, false, "wgmma_fp8_512x16", true},
    {512, 32, 8, 8, 2, 19.0, false, "wgmma_fp8_512x32", true},
    {256, 64, 24, 8, 2, 50.0, true, "wgmma_fp8_256x64", true},
    {256, 128, 40, 8, 2, 150.0, true, "wgmma_fp8_256x128", true},
    {128, 256, 96, 16, 2, 1e30, true, "wgmma_fp8_128x256", true, 2, true},
}};

// Tiles may be split along K where K is long enough to share, and where bits may depend on the batch.
inline bool splits_k(const MoeConfig& config, int64_t k) {
  return !config->batch_invariant && cuda::ceil_div(k, cuda::kTileK) >= 4;
}

// Without TMA a GEMM waits for its weights, and reducing a split tile takes as long as reading so many bytes of them:
// tiles are not split for less.
inline constexpr int64_t kSplitCostBytes = 80 * 1024;
// The same of a wide tile, in k-blocks.
inline constexpr int64_t kSplitCostKBlocks = 10;
constexpr int64_t min_saved_k_blocks(const GemmConfig& gemm) {
  return gemm.tma_rows ? kSplitCostKBlocks
                       : cuda::ceil_div(kSplitCostBytes, gemm.tile_m / cuda::kTileRows * cuda::kTileBytes);
}
// Whoever reduces a split tile reads the accumulators of all its splits, each of which takes as long as multiplying a
// k-block where tiles are wide.
inline constexpr int32_t kMaxWideSplits = 4;
constexpr int32_t max_splits(const GemmConfig& gemm) { return gemm.tma_rows ? kMaxWideSplits : 1 << 15; }

// Up to so many k-blocks of 512 weight rows, of one GEMM and multiprocessor, tiles of 256 weight rows are taken: they are
// shared out more evenly, and the last one to arrive leaves less to multiply.
inline constexpr int64_t kMaxKBlocksOfSmallTiles = 24;
// The index in kGemmConfigs for the routed experts of a batch.
inline int routed_config(const MoeConfig& config, const ExpertRange& range, int64_t tokens) {
  const int64_t rows = tokens * config->top_k;
  const double rows_per_expert = static_cast<double>(rows) / static_cast<double>(config->num_experts);
  size_t index = 1;
  while (rows_per_expert > kGemmConfigs[index].max_rows_per_expert) ++index;
  if (index != 1) return static_cast<int>(index);
  const int64_t local_rows = cuda::ceil_div(rows * range.count, config->num_experts);
  const int64_t k_blocks =
      local_rows * cuda::ceil_div(config->intermediate_size, 256) * cuda::ceil_div(config->hidden_size, cuda::kTileK);
  return k_blocks <= kMaxKBlocksOfSmallTiles * kMaxCtas ? 0 : 1;
}
// The same for the shared expert, whose number of rows is known: one tile, up to the largest configuration's.
inline int shared_config(int64_t tokens) {
  size_t index = 1;
  while (index + 1 < kBf16Configs && tokens > kGemmConfigs[index].tile_n) ++index;
  return static_cast<int>(index);
}

// The same under fp8: indices into its table. Rows by TMA have 64 k at least, and those of gemm1 take the place of bf16
// ones.
inline constexpr int64_t kLeastTmaHidden = 32;
inline constexpr int64_t kMaxKBlocksOfSmallFp8Tiles = 96;  // as kMaxKBlocksOfSmallTiles
inline int routed_fp8_config(const MoeConfig& config, const ExpertRange& range, int64_t tokens) {
  const int64_t rows = tokens * config->top_k;
  const double rows_per_expert = static_cast<double>(rows) / static_cast<double>(config->num_experts);
  const auto table = std::span(kGemmConfigs).subspan<kBf16Configs>();
  size_t index = 1;
  while (rows_per_expert > table[index].max_rows_per_expert &&
         (config->hidden_size >= kLeastTmaHidden || !table[index + 1].tma_rows))
    ++index;
  if (index != 1) return static_cast<int>(index);
  const int64_t local_rows = cuda::ceil_div(rows * range.count, config->num_experts);
  const int64_t k_blocks =
      local_rows * cuda::ceil_div(config->intermediate_size, 256) * cuda::ceil_div(config->hidden_size, cuda::kTileK);
  return k_blocks <= kMaxKBlocksOfSmallFp8Tiles * kMaxCtas ? 0 : 1;
}
inline int shared_fp8_config(int64_t tokens) {
  const auto table = std::span(kGemmConfigs).subspan<kBf16Configs>();
  size_t index = 1;
  while (index + 1 < table.size() && tokens > table[index].tile_n) ++index;
  return static_cast<int>(index);
}

}  // namespace nvfp4_moe::sm90
