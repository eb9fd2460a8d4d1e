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

template <size_t kIndex, class Rows>
Status launch_gemm1(const LaunchSite& site, const GemmArgs& args, const Gemm1Params& params, const Rows& rows) {
  using Traits = GemmTraits<kIndex>;
  return cuda::launch<sm90_gemm1_kernel<kIndex, Rows>>("gemm1_swiglu", site.ctas, Traits::kThreads,
                                                       sizeof(Shared<Traits>), site.stream, args,
                                                       SwigluEpilogue<Traits::kTmaRows>{params}, rows);
}
template <size_t kIndex, class Rows>
Status launch_gemm2(const LaunchSite& site, const GemmArgs& args, const Gemm2Params& params, const Rows& rows) {
  using Traits = GemmTraits<kIndex>;
  return cuda::launch<sm90_gemm2_kernel<kIndex, Rows>>("gemm2", site.ctas, Traits::kThreads, sizeof(Shared<Traits>),
                                                       site.stream, args, DownEpilogue{params}, rows);
}

template <int kTileM, int kTileN>
constexpr KernelEntry make_kernel_entry() {
  constexpr size_t kIndex = compiled_config(kTileM, kTileN);
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
