// What this backend brings to the launches of FP4 GEMMs (backend/cuda/fp4/gemm_launch.cuh).
#pragma once

#include "backend/cuda/fp4/gemm_launch.cuh"
#include "backend/sm120/config.h"
#include "backend/sm120/gemm.cuh"

namespace nvfp4_moe::sm120 {

struct Room {
  using Scratch = sm120::Scratch;
  static constexpr bool kFp4 = true;
  static constexpr int kBlockK = sm120::kBlockK;
  static constexpr const auto& kGemmConfigs = sm120::kGemmConfigs;
  static constexpr int32_t min_saved_k_blocks(const GemmConfig& gemm) { return sm120::min_saved_k_blocks(gemm); }
  static constexpr int32_t max_splits(const GemmConfig& gemm) { return sm120::max_splits(gemm); }
  template <size_t kIndex>
  struct LaunchShape {
    static constexpr int kThreads = GemmTraits<kIndex>::kThreads;
    static constexpr int64_t kSharedBytes = sizeof(Shared<GemmTraits<kIndex>>);
  };
};

}  // namespace nvfp4_moe::sm120
