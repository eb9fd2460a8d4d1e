// Compiles both GEMMs of one configuration and makes its entry of them: what the files under configs/ include.
#pragma once

#include <cstddef>

#include "backend/cuda/device/launch.cuh"
#include "backend/sm90/config.h"
#include "backend/sm90/gemm1.cuh"
#include "backend/sm90/gemm2.cuh"
#include "backend/sm90/kernels.h"
#include "backend/sm90/shared.cuh"

namespace nvfp4_moe::sm90 {

// The index of the configuration of a tile's sides; there is one.
consteval size_t config_of(int tile_m, int tile_n, bool fp8) {
  size_t index = fp8 ? kBf16Configs : 0;
  while (kGemmConfigs[index].tile_m != tile_m || kGemmConfigs[index].tile_n != tile_n) ++index;
  return index;
}

template <size_t kIndex, class Rows>
Status launch_gemm1(const LaunchSite& site, const GemmArgs& args, const Gemm1Params& params, const Rows& rows) {
  using Traits = GemmTraits<kIndex>;
  return cuda::launch<sm90_gemm1_kernel<kIndex, Rows>>("gemm1_swiglu", site.ctas, Traits::kThreads,
                                                       sizeof(Shared<Traits>), site.stream, args,
                                                       SwigluEpilogueOf<Traits>{params}, rows);
}
template <size_t kIndex, class Rows>
Status launch_gemm2(const LaunchSite& site, const GemmArgs& args, const Gemm2Params& params, const Rows& rows) {
  using Traits = GemmTraits<kIndex>;
  return cuda::launch<sm90_gemm2_kernel<kIndex, Rows>>("gemm2", site.ctas, Traits::kThreads, sizeof(Shared<Traits>),
                                                       site.stream, args,
                                                       DownEpilogue<typename Traits::Products>{params}, rows);
}

template <int kTileM, int kTileN, bool kFp8 = false>
constexpr KernelEntry make_kernel_entry() {
  constexpr size_t kIndex = config_of(kTileM, kTileN, kFp8);
  KernelEntry entry{};
  entry.config = kIndex;
  if constexpr (GemmTraits<kIndex>::kTmaRows) {
    entry.gemm1_tma = launch_gemm1<kIndex, TmaRows>;
    entry.gemm2_tma = launch_gemm2<kIndex, TmaRows>;
  } else {
    entry.gemm1 = launch_gemm1<kIndex, GatheredRows>;
    entry.gemm2 = launch_gemm2<kIndex, GatheredRows>;
  }
  if constexpr (GemmTraits<kIndex>::kMayFuseRouting) entry.gemm1_fused_routing = launch_gemm1<kIndex, FusedRoutingRows>;
  return entry;
}

}  // namespace nvfp4_moe::sm90
