// What this backend brings to the launches of FP4 GEMMs (backend/cuda/fp4/gemm_launch.cuh).
#pragma once

#include "backend/cuda/fp4/gemm_launch.cuh"
#include "backend/sm100/config.h"
#include "backend/sm100/gemm.cuh"

namespace nvfp4_moe::sm100 {

struct Room {
  using Scratch = sm100::Scratch;
  static constexpr const auto& kGemmConfigs = sm100::kGemmConfigs;
  static constexpr int32_t min_saved_k_blocks(const GemmConfig& gemm) { return sm100::min_saved_k_blocks(gemm); }
  static constexpr int32_t max_splits(const GemmConfig& gemm) { return sm100::max_splits(gemm); }
  template <size_t kIndex>
  struct LaunchShape {
    static constexpr int kThreads = GemmTraits<kIndex>::kThreads;
    static constexpr int64_t kSharedBytes = sizeof(Shared<GemmTraits<kIndex>>);
  };
};

}  // namespace nvfp4_moe::sm100
