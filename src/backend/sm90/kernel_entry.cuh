// Compiles both GEMMs of one configuration and makes its KernelEntry. Included by the files in
// configs/.
#pragma once

#include <algorithm>
#include <cstddef>

#include "backend/cuda/device/launch.cuh"
#include "backend/sm90/config.h"
#include "backend/sm90/gemm1.cuh"
#include "backend/sm90/gemm2.cuh"
#include "backend/sm90/kernels.h"
#include "backend/sm90/shared.cuh"

namespace nvfp4_moe::internal::sm90 {

template <size_t kIndex, class Rows>
Status launch_gemm1(const LaunchSite& site, const GemmArgs& args, const Gemm1Params& params,
                    const Rows& rows) {
  using Traits = GemmTraits<kIndex>;
  return cuda::with_gemm1_function(params.function, [&]<cuda::Gemm1Function kFunction>() {
    using Epilogue = Gemm1EpilogueOf<Traits, kFunction>;
    Epilogue epilogue{};
    static_cast<Gemm1Params&>(epilogue) = params;
    return cuda::launch<sm90_gemm1_kernel<kIndex, Rows, Epilogue>>(
        "gemm1_swiglu", site.ctas, Traits::kThreads, sizeof(Shared<Traits>), site.stream, args,
        epilogue, rows);
  });
}
template <size_t kIndex, class Rows>
Status launch_gemm2(const LaunchSite& site, const GemmArgs& args, const Gemm2Params& params,
                    const Rows& rows) {
  using Traits = GemmTraits<kIndex>;
  return cuda::launch<sm90_gemm2_kernel<kIndex, Rows>>(
      "gemm2", site.ctas, Traits::kThreads, sizeof(Shared<Traits>), site.stream, args,
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
  if constexpr (GemmTraits<kIndex>::kMayFuseRouting)
    entry.gemm1_fused_routing = launch_gemm1<kIndex, FusedRoutingRows>;
  if constexpr (GemmTraits<kIndex>::kMayFuseRequantize)
    entry.gemm2_requantize = launch_gemm2<kIndex, RequantizedRows>;
  return entry;
}

// The same with the wide configuration included, for the functions of swiglu. All other kernels are
// those of the narrow one only.
template <size_t kIndex>
Status launch_gemm1_narrow_or_wide(const LaunchSite& site, const GemmArgs& narrow,
                                   const GemmArgs& wide, const Gemm1Params& params,
                                   const GatheredRows& rows) {
  using Traits = GemmTraits<kIndex>;
  using Epilogue = Gemm1EpilogueOf<Traits, cuda::Gemm1Function::kSwiglu>;
  constexpr size_t kBytes =
      std::max(sizeof(Shared<Traits>), sizeof(Shared<GemmTraits<wide_of<kIndex>, true>>));
  Epilogue epilogue{};
  static_cast<Gemm1Params&>(epilogue) = params;
  return cuda::launch<sm90_gemm1_narrow_or_wide_kernel<kIndex, Epilogue>>(
      "gemm1_swiglu", site.ctas, Traits::kThreads, kBytes, site.stream, narrow, wide, epilogue,
      rows);
}
template <size_t kIndex>
Status launch_gemm2_narrow_or_wide(const LaunchSite& site, const GemmArgs& narrow,
                                   const GemmArgs& wide, const Gemm2Params& params,
                                   const GatheredRows& rows, const TmaRows& tma_rows) {
  using Traits = GemmTraits<kIndex>;
  constexpr size_t kBytes =
      std::max(sizeof(Shared<Traits>), sizeof(Shared<GemmTraits<wide_of<kIndex>>>));
  return cuda::launch<sm90_gemm2_narrow_or_wide_kernel<kIndex>>(
      "gemm2", site.ctas, Traits::kThreads, kBytes, site.stream, narrow, wide,
      DownEpilogue<typename Traits::Products>{params}, rows, tma_rows);
}
template <int kTileM, int kTileN, bool kFp8 = false>
constexpr KernelEntry make_kernel_entry_with_wide() {
  constexpr size_t kIndex = config_of(kTileM, kTileN, kFp8, true);
  static_assert(GemmTraits<kIndex>::kThreads == GemmTraits<wide_of<kIndex>>::kThreads);
  KernelEntry entry{};
  entry.config = kIndex;
  entry.gemm1_narrow_or_wide = launch_gemm1_narrow_or_wide<kIndex>;
  entry.gemm2_narrow_or_wide = launch_gemm2_narrow_or_wide<kIndex>;
  return entry;
}

}  // namespace nvfp4_moe::internal::sm90
