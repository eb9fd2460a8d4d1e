// The compiled tile shapes of the plain GEMMs. A run uses the smallest that holds an
// expert's average number of rows. A row's bits do not depend on it.
#pragma once

#include <array>
#include <cstdint>

#include "backend/cuda/run_plan.h"

namespace nvfp4_moe::internal::cuda::plain {

inline constexpr int kSmallTileN = 16, kLargeTileN = 64;
inline constexpr std::array<GemmConfig, 2> kConfigs = {{
    {"mma_128x16", kSmallTileN, false, false, false, 0},
    {"mma_128x64", kLargeTileN, false, false, false, 0},
}};

inline int routed_config(const MoeConfig& config, const ExpertRange&, int64_t tokens) {
  return tokens * config->top_k <= kSmallTileN * config->num_experts ? 0 : 1;
}
inline int shared_config(int64_t tokens) { return tokens <= kSmallTileN ? 0 : 1; }
inline bool splits_k(const MoeConfig&, int64_t) { return false; }

}  // namespace nvfp4_moe::internal::cuda::plain
