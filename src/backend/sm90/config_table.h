// Chooses the compiled configuration for a batch. There are two tables, one for bf16 products and
// one for E4M3 products.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/backend.h"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/run_plan.h"
#include "backend/sm90/config.h"
#include "core/config.h"

namespace nvfp4_moe::internal::sm90 {

// Tiles may be split along K if K is long enough, and if bits may depend on the batch.
inline bool splits_k(const MoeConfig& config, int64_t k) {
  return !config->batch_invariant && cuda::ceil_div(k, cuda::kTileK) >= 4;
}

// The configurations of a table that a batch chooses from, in this order. The size of their
// partials grows, so that a workspace grows with its tokens.
struct ConfigTable {
  std::span<const GemmConfig> configs;
  std::span<const int> of_layer;  // for a layer with all its experts, and for a shared expert
  std::span<const int>
      of_rank;  // for a rank with part of the experts, from kMinTokensWithWide tokens on
  // If a GEMM has at most this many k-blocks of 512 weight rows per multiprocessor, the table's
  // first configuration (tiles of 256 weight rows) replaces its second. Smaller tiles divide the
  // work more evenly, and the last one leaves less to multiply at the end.
  int64_t most_k_blocks_of_small_tiles;
  int64_t least_tma_hidden;  // minimum hidden size for which gemm1 may copy rows by TMA
};
inline constexpr std::array<int, 5> kBf16OfLayer = {1, 2, 3, 4, 8};
inline constexpr std::array<int, 4> kBf16OfRank = {5, 6, 7, 8};
inline constexpr std::array<int, 6> kFp8OfLayer = {1, 2, 3, 4, 8, 9};
inline constexpr std::array<int, 6> kFp8OfRank = {5, 6, 7, 4, 8, 9};
inline constexpr ConfigTable kBf16Table = {std::span(kGemmConfigs).first<kBf16Configs>(),
                                           kBf16OfLayer, kBf16OfRank, 24, 1};
// E4M3 rows for TMA are multiples of 64 bytes (64 k), and gemm1's are stored in the space of bf16
// rows.
inline constexpr ConfigTable kFp8Table = {std::span(kGemmConfigs).subspan<kBf16Configs>(),
                                          kFp8OfLayer, kFp8OfRank, 96, 32};

// From this many tokens on the kernels of a narrow configuration also contain a wide one. With
// fewer tokens the narrow one handles any routing nearly as well.
inline constexpr int64_t kMinTokensWithWide = 33;
// The index in the table for the routed experts of a batch.
inline int routed_config(const ConfigTable& table, const MoeConfig& config,
                         const ExpertRange& range, int64_t tokens) {
  const int64_t rows = tokens * config->top_k;
  const double rows_per_expert =
      static_cast<double>(rows) / static_cast<double>(config->num_experts);
  const bool may_use_tma = config->hidden_size >= table.least_tma_hidden;
  const bool with_wide = range.count < config->num_experts && tokens >= kMinTokensWithWide &&
                         may_use_tma && cuda::has_wide_kernels(config->activation);
  const std::span<const int> offered = with_wide ? table.of_rank : table.of_layer;
  const auto config_at = [&](size_t i) -> const GemmConfig& {
    return table.configs[static_cast<size_t>(offered[i])];
  };
  size_t taken = 0;
  while (rows_per_expert > config_at(taken).max_rows_per_expert &&
         (may_use_tma || !config_at(taken + 1).tma_rows))
    ++taken;
  if (offered[taken] != 1) return offered[taken];
  const int64_t local_rows = cuda::ceil_div(rows * range.count, config->num_experts);
  const int64_t k_blocks = local_rows * cuda::ceil_div(config->intermediate_size, 256) *
                           cuda::ceil_div(config->hidden_size, cuda::kTileK);
  return k_blocks <= table.most_k_blocks_of_small_tiles * kMaxCtas ? 0 : 1;
}
// The same for the shared expert, whose number of rows is known: the smallest configuration that
// holds them in one tile, or the largest.
inline int shared_config(const ConfigTable& table, int64_t tokens) {
  for (const int index : table.of_layer)
    if (tokens <= table.configs[static_cast<size_t>(index)].tile_n) return index;
  return table.of_layer.back();
}

}  // namespace nvfp4_moe::internal::sm90
