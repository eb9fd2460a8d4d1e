// The compiled kernels for host code: one entry for each of kGemmConfigs, each compiled by its own
// file in configs/.
#pragma once

#include <cstddef>

#include "core/status.h"

namespace nvfp4_moe::internal::sm90 {

struct GemmArgs;  // gemm_params.cuh
struct Gemm1Params;
struct Gemm2Params;
struct GatheredRows;
struct FusedRoutingRows;
struct RequantizedRows;
struct TmaRows;

struct LaunchSite {
  unsigned ctas;
  void* stream;
};

// Enqueues a kernel of one configuration, or of two. null if the configuration does not support
// that source of rows.
struct KernelEntry {
  size_t config;  // index in kGemmConfigs
  Status (*gemm1)(const LaunchSite&, const GemmArgs&, const Gemm1Params&, const GatheredRows&);
  Status (*gemm1_fused_routing)(const LaunchSite&, const GemmArgs&, const Gemm1Params&,
                                const FusedRoutingRows&);
  Status (*gemm1_tma)(const LaunchSite&, const GemmArgs&, const Gemm1Params&, const TmaRows&);
  Status (*gemm2)(const LaunchSite&, const GemmArgs&, const Gemm2Params&, const GatheredRows&);
  Status (*gemm2_tma)(const LaunchSite&, const GemmArgs&, const Gemm2Params&, const TmaRows&);
  // For two configurations, the second one wide. route's list of tiles selects one of them.
  Status (*gemm1_narrow_or_wide)(const LaunchSite&, const GemmArgs&, const GemmArgs&,
                                 const Gemm1Params&, const GatheredRows&);
  Status (*gemm2_narrow_or_wide)(const LaunchSite&, const GemmArgs&, const GemmArgs&,
                                 const Gemm2Params&, const GatheredRows&, const TmaRows&);
  Status (*gemm2_requantize)(const LaunchSite&, const GemmArgs&, const Gemm2Params&,
                             const RequantizedRows&);
};

// config: index in kGemmConfigs.
const KernelEntry& kernel_entry(size_t config);

extern const KernelEntry kM256N8, kM512N8, kM512N16, kM512N32, kM256N64, kM256N128;
extern const KernelEntry kM512N8OrWide, kM512N16OrWide, kM512N32OrWide;
extern const KernelEntry kFp8M256N8, kFp8M512N8, kFp8M512N16, kFp8M512N32, kFp8M256N64,
    kFp8M256N128, kFp8M128N256;
extern const KernelEntry kFp8M512N8OrWide, kFp8M512N16OrWide, kFp8M512N32OrWide;

}  // namespace nvfp4_moe::internal::sm90
