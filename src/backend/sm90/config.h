// The compiled configurations of the Hopper GEMMs, as data; which of them a batch takes,
// config_table.h says.
//
// Weights are the M dimension and activations the N dimension. A tile is tile_m weight rows by up
// to tile_n rows of activations. The host knows how many rows an expert has on average, not how
// many each has: a configuration must hold almost every expert's rows in one tile, since a second
// tile reads the expert's weights again.
//
// A rank with a part of the experts may get all of the batch's assignments, many times the average.
// There the kernels of a narrow configuration hold a wide one's too, and take what route has listed
// tiles for: it knows the rank's rows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::internal::sm90 {

inline constexpr int kMaxSharedBytes = 227 * 1024;  // of one cta
inline constexpr int kMaxCtas = 144;                // one a multiprocessor; no Hopper has more

struct GemmConfig {
  int tile_m;           // weight rows of a tile, a multiple of 128
  int tile_n;           // rows of activations of a tile, at most: N of the widest wgmma
  int min_n;            // N of the narrowest wgmma: a tile takes the narrowest that holds its rows
  int n_step;           // from one wgmma's N to the next, a multiple of 8
  int steps_per_group;  // steps of one wgmma commit group: k16, or k32 under fp8
  double max_rows_per_expert;  // taken up to that many, on average
  bool tma_rows;               // rows come by TMA tensor copies, not by cp.async
  const char* name;
  bool fp8 = false;             // E4M3 times E4M3; else bf16 times bf16
  int consumer_warpgroups = 4;  // that share the weight rows of a tile
  // fragments are made while the products before them run, in registers of their own
  bool ahead = false;
  int wide = -1;  // index in its table of what its kernels hold besides, for a rank with many rows;
                  // -1: none

  // Accumulators of a split-K partial, fp32.
  constexpr int64_t partial_bytes() const { return int64_t{tile_m} * tile_n * 4; }
  // Of wide tiles products are what takes time, and their outputs leave through shared memory.
  constexpr bool wide_tiles() const { return tile_n >= 64; }
  // Whether it is compiled with a producer that routes a small batch by itself.
  constexpr bool fused_routing() const { return tile_n == 8; }
  // Whether gemm2 is also compiled with a producer that turns the bf16 intermediate to E4M3 itself.
  constexpr bool fused_requantize() const { return fp8 && tile_n == 8 && wide < 0; }
};
// A layer takes them from one of two tables, which are the two parts of this one; a RunPlan has
// indices into a table.
inline constexpr size_t kBf16Configs = 9, kFp8Configs = 10;
inline constexpr int kWideConfig = 8;  // in either table
inline constexpr std::array<GemmConfig, kBf16Configs + kFp8Configs> kGemmConfigs = {{
    // The first is taken in place of the second if there is little work: see routed_config.
    {256, 8, 8, 8, 4, 2.5, false, "wgmma_256x8"},
    {512, 8, 8, 8, 2, 2.5, false, "wgmma_512x8"},
    {512, 16, 8, 8, 2, 8.0, false, "wgmma_512x16"},
    {512, 32, 8, 8, 2, 19.0, false, "wgmma_512x32"},
    {256, 64, 24, 8, 4, 32.0, true, "wgmma_256x64"},
    // Of a rank with a part of the experts, from 33 tokens on. They stand here since accumulators
    // of a partial grow from
    // one configuration to the next that a larger batch takes.
    {512, 8, 8, 8, 2, 2.5, false, "wgmma_512x8", false, 4, false, kWideConfig},
    {512, 16, 8, 8, 2, 8.0, false, "wgmma_512x16", false, 4, false, kWideConfig},
    {512, 32, 8, 8, 2, 19.0, false, "wgmma_512x32", false, 4, false, kWideConfig},
    {256, 128, 8, 8, 2, 1e30, true, "wgmma_256x128"},
    // E4M3. The last has as many products as registers allow between two reads of a row from shared
    // memory.
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

// The wide configuration that stands beside one, in kGemmConfigs.
constexpr size_t wide_beside(size_t index) {
  return static_cast<size_t>(kGemmConfigs[index].wide) +
         (kGemmConfigs[index].fp8 ? kBf16Configs : 0);
}

// The index of the configuration of a tile's sides and operands, with a wide one beside it or
// without; there is one.
constexpr size_t config_of(int tile_m, int tile_n, bool fp8 = false, bool with_wide = false) {
  size_t index = 0;
  while (kGemmConfigs[index].tile_m != tile_m || kGemmConfigs[index].tile_n != tile_n ||
         kGemmConfigs[index].fp8 != fp8 || (kGemmConfigs[index].wide >= 0) != with_wide)
    ++index;
  return index;
}

// Without TMA a GEMM waits for its weights, and reducing a split tile takes as long as reading that
// many bytes of them: tiles are not split for less.
inline constexpr int64_t kSplitCostBytes = 80 * 1024;
// The same of a wide tile, in k-blocks.
inline constexpr int64_t kSplitCostKBlocks = 10;
constexpr int64_t min_saved_k_blocks(const GemmConfig& gemm) {
  return gemm.wide_tiles()
             ? kSplitCostKBlocks
             : cuda::ceil_div(kSplitCostBytes, gemm.tile_m / cuda::kTileRows * cuda::kTileBytes);
}
// Whoever reduces a split tile reads the accumulators of all its splits, each of which takes as
// long as multiplying a k-block if tiles are wide.
inline constexpr int32_t kMaxWideSplits = 4;
constexpr int32_t max_splits(const GemmConfig& gemm) {
  return gemm.wide_tiles() ? kMaxWideSplits : 1 << 15;
}

}  // namespace nvfp4_moe::internal::sm90
