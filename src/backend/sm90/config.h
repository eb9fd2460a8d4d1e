// The compiled configurations of the Hopper GEMMs, as data. config_table.h chooses one for a batch.
//
// Weights are the M dimension and activations the N dimension. A tile is tile_m weight rows by up
// to tile_n rows of activations. The host knows the average number of rows per expert, not the
// number of each. A configuration must hold almost every expert's rows in one tile, since a second
// tile reads the expert's weights again.
//
// A rank with only part of the experts may receive all assignments of the batch, many times the
// average. For such a rank the kernels of a narrow configuration also contain a wide one, and use
// the one for which route has listed tiles, since route knows the rank's rows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::internal::sm90 {

inline constexpr int kMaxSharedBytes = 227 * 1024;  // per cta
inline constexpr int kMaxCtas = 144;  // one per multiprocessor; no Hopper GPU has more

struct GemmConfig {
  int tile_m;           // weight rows per tile, a multiple of 128
  int tile_n;           // maximum rows of activations per tile: N of the widest wgmma
  int min_n;            // N of the narrowest wgmma: a tile uses the narrowest that holds its rows
  int n_step;           // increment of N between wgmmas, a multiple of 8
  int steps_per_group;  // steps per wgmma commit group: k16, or k32 under fp8
  double max_rows_per_expert;  // used up to this average number
  bool tma_rows;               // rows are copied by TMA, not gathered by cp.async
  const char* name;
  bool fp8 = false;             // E4M3 times E4M3; otherwise bf16 times bf16
  int consumer_warpgroups = 4;  // number that share the weight rows of a tile
  // fragments are made in separate registers while the previous products run
  bool ahead = false;
  // index in its table of the wide configuration that its kernels also contain, for a rank with
  // many rows; -1: none
  int wide = -1;

  // Size of a split-K partial: fp32 accumulators.
  constexpr int64_t partial_bytes() const { return int64_t{tile_m} * tile_n * 4; }
  // In wide tiles the products dominate, and outputs are stored through shared memory.
  constexpr bool wide_tiles() const { return tile_n >= 64; }
  // Whether it is also compiled with a producer that routes a small batch itself.
  constexpr bool fused_routing() const { return tile_n == 8; }
  // Whether gemm2 is also compiled with a producer that converts the bf16 intermediate to E4M3
  // itself.
  constexpr bool fused_requantize() const { return fp8 && tile_n == 8 && wide < 0; }
};
// A layer uses one of two tables, which are the two parts of kGemmConfigs. A RunPlan has indices
// into its layer's table.
inline constexpr size_t kBf16Configs = 9, kFp8Configs = 10;
inline constexpr int kWideConfig = 8;  // in both tables
inline constexpr std::array<GemmConfig, kBf16Configs + kFp8Configs> kGemmConfigs = {{
    // The first replaces the second if there is little work: see routed_config.
    {256, 8, 8, 8, 4, 2.5, false, "wgmma_256x8"},
    {512, 8, 8, 8, 2, 2.5, false, "wgmma_512x8"},
    {512, 16, 8, 8, 2, 8.0, false, "wgmma_512x16"},
    {512, 32, 8, 8, 2, 19.0, false, "wgmma_512x32"},
    {256, 64, 24, 8, 4, 32.0, true, "wgmma_256x64"},
    // For a rank with part of the experts, from 33 tokens on. Listed here because the size of a
    // partial must not shrink from one configuration to that of a larger batch.
    {512, 8, 8, 8, 2, 2.5, false, "wgmma_512x8", false, 4, false, kWideConfig},
    {512, 16, 8, 8, 2, 8.0, false, "wgmma_512x16", false, 4, false, kWideConfig},
    {512, 32, 8, 8, 2, 19.0, false, "wgmma_512x32", false, 4, false, kWideConfig},
    {256, 128, 8, 8, 2, 1e30, true, "wgmma_256x128"},
    // E4M3. The last one does as many products per read of a row from shared memory as registers
    // allow.
    {256, 8, 8, 8, 2, 2.5, false, "wgmma_fp8_256x8", true},
    {512, 8, 8, 8, 2, 2.5, false, "wgmma_fp8_512x8", true},
    {512, 16, 8, 8, 2, 4.5, false, "wgmma_fp8_512x16", true},
    {512, 32, 8, 8, 2, 19.0, false, "wgmma_fp8_512x32", true},
    {256, 64, 24, 8, 2, 50.0, true, "wgmma_fp8_256x64", true},
    {512, 8, 8, 8, 2, 2.5, false, "wgmma_fp8_512x8", true, 4, false, kWideConfig},
    {512, 16, 8, 8, 2, 4.5, false, "wgmma_fp8_512x16", true, 4, false, kWideConfig},
    {512, 32, 8, 8, 2, 19.0, false, "wgmma_fp8_512x32", true, 4, false, kWideConfig},
    {256, 128, 8, 8, 2, 150.0, true, "wgmma_fp8_256x128", true},
    {128, 256, 96, 16, 2, 1e30, true, "wgmma_fp8_128x256", true, 2, true},
}};

// The index in kGemmConfigs of the wide configuration that this one contains.
constexpr size_t wide_beside(size_t index) {
  return static_cast<size_t>(kGemmConfigs[index].wide) +
         (kGemmConfigs[index].fp8 ? kBf16Configs : 0);
}

// The index of the configuration with these tile sizes and operands, with or without a wide one. It
// must exist.
constexpr size_t config_of(int tile_m, int tile_n, bool fp8 = false, bool with_wide = false) {
  size_t index = 0;
  while (kGemmConfigs[index].tile_m != tile_m || kGemmConfigs[index].tile_n != tile_n ||
         kGemmConfigs[index].fp8 != fp8 || (kGemmConfigs[index].wide >= 0) != with_wide)
    ++index;
  return index;
}

// Without TMA a GEMM waits for its weights. Reducing a split tile takes as long as reading this
// many bytes of weights, so tiles are split only if that saves more.
inline constexpr int64_t kSplitCostBytes = 80 * 1024;
// The same for a wide tile, in k-blocks.
inline constexpr int64_t kSplitCostKBlocks = 10;
constexpr int64_t min_saved_k_blocks(const GemmConfig& gemm) {
  return gemm.wide_tiles()
             ? kSplitCostKBlocks
             : cuda::ceil_div(kSplitCostBytes, gemm.tile_m / cuda::kTileRows * cuda::kTileBytes);
}
// The cta that reduces a split tile reads the accumulators of all its splits. In wide tiles, each
// split takes as long to read as a k-block takes to multiply.
inline constexpr int32_t kMaxWideSplits = 4;
constexpr int32_t max_splits(const GemmConfig& gemm) {
  return gemm.wide_tiles() ? kMaxWideSplits : 1 << 15;
}

}  // namespace nvfp4_moe::internal::sm90
