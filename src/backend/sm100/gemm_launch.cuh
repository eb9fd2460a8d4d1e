// What this backend brings to the launches of FP4 GEMMs (backend/cuda/fp4/gemm_launch.cuh).
#pragma once

#include "backend/cuda/fp4/gemm_launch.cuh"
#include "backend/sm100/bf16_gemm.cuh"
#include "backend/sm100/config.h"
#include "backend/sm100/gemm.cuh"

namespace nvfp4_moe::sm100 {

struct Room {
  using Scratch = sm100::Scratch;
  static constexpr bool kFp4 = true;
  static constexpr int kBlockK = sm100::kBlockK;
  static constexpr const auto& kGemmConfigs = sm100::kGemmConfigs;
  static constexpr int32_t min_saved_k_blocks(const GemmConfig& gemm) { return sm100::min_saved_k_blocks(gemm); }
  static constexpr int32_t max_splits(const GemmConfig& gemm) { return sm100::max_splits(gemm); }
  template <size_t kIndex>
  struct LaunchShape {
    static constexpr int kThreads = GemmTraits<kIndex>::kThreads;
    static constexpr int64_t kSharedBytes = sizeof(Shared<GemmTraits<kIndex>>);
  };
};

// The same under bf16 activations.
struct Bf16Room {
  using Scratch = sm100::Scratch;
  static constexpr bool kFp4 = false;
  static constexpr int kBlockK = kBf16BlockK;
  static constexpr const auto& kGemmConfigs = kBf16GemmConfigs;
  // The same bytes of weights, in k-blocks half as long.
  static constexpr int32_t min_saved_k_blocks(const GemmConfig& gemm) { return 2 * sm100::min_saved_k_blocks(gemm); }
  static constexpr int32_t max_splits(const GemmConfig& gemm) { return sm100::max_splits(gemm); }
  template <size_t kIndex>
  struct LaunchShape {
    static constexpr int kThreads = Bf16Traits<kIndex>::kThreads;
    static constexpr int64_t kSharedBytes = sizeof(Bf16Shared<Bf16Traits<kIndex>>);
  };
};

}  // namespace nvfp4_moe::sm100
