// Every kernel's Config. This file is compiled once for each kernel, which PTXEMU_KERNEL names: one
// takes up to a minute and 5 GiB.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

using namespace cute;
using namespace cutlass::gemm;
using namespace cutlass::epilogue;

struct OneCta : Sm100Config {
  using Tile = Shape<_128, _128, _256>;
  using Schedule = KernelTmaWarpSpecialized1SmNvf4Sm100;
  using EpilogueSchedule = TmaWarpSpecialized1Sm;
};
struct Pair : Sm100Config {
  using Tile = Shape<_256, _128, _256>;
  using Cluster = Shape<_2, _1, _1>;
  using Schedule = KernelTmaWarpSpecialized2SmNvf4Sm100;
  using EpilogueSchedule = TmaWarpSpecialized2Sm;
};
struct Consumers : Sm120Config {  // two warpgroups on a tile
  using Tile = Shape<_128, _128, _128>;
  using Schedule = KernelTmaWarpSpecializedCooperative;
};

// bf16 of one cta by kind::f16.
struct Sm100Bf16 : OneCta {
  static constexpr char kName[] = "sm100_bf16";
  using Operand = Bf16;
  using Tile = Shape<_128, _128, _64>;
  using D = float;
  using Schedule = KernelTmaWarpSpecialized1SmSm100;
};
// NVFP4 of one cta: tcgen05.cp of scales, tcgen05.mma, tensor copies, clusterlaunchcontrol. The
// output is fp32.
struct Sm100Dense : OneCta {
  static constexpr char kName[] = "sm100_dense";
  using D = float;
};
// NVFP4 in and out: the epilogue makes E2M1 codes and their scales.
struct Sm100Fp4Output : OneCta {
  static constexpr char kName[] = "sm100_fp4_output";
  using D = E2m1;
};
// Several products in a launch, of one cta each tile: tensor maps that the kernel rewrites
// (tensormap.replace).
struct Sm100Grouped : OneCta {
  static constexpr char kName[] = "sm100_grouped";
  using Schedule = KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100;
  using EpilogueSchedule = PtrArrayTmaWarpSpecialized1Sm;
  static constexpr bool kGrouped = true;
};
struct Sm100GroupedPair : Pair {
  static constexpr char kName[] = "sm100_grouped_pair";
  using Schedule = KernelPtrArrayTmaWarpSpecialized2SmNvf4Sm100;
  using EpilogueSchedule = PtrArrayTmaWarpSpecialized2Sm;
  static constexpr bool kGrouped = true;
};
// Tiles of 64 columns: two tiles share a tile of B's scales, and every second one uses its second
// half.
struct Sm100Narrow : OneCta {
  static constexpr char kName[] = "sm100_narrow";
  using Tile = Shape<_128, _64, _256>;
};
// Pairs of ctas (cta_group::2) in clusters of eight: multicast, commits to several ctas.
struct Sm100Pair : Pair {
  static constexpr char kName[] = "sm100_pair";
  using Cluster = Shape<_4, _2, _1>;
};
// Tiles of 192 columns by pairs of ctas: B's scales are copied for 256, and every second tile
// begins within a tile of scales.
struct Sm100Wide : Pair {
  static constexpr char kName[] = "sm100_wide";
  using Tile = Shape<_256, Int<192>, _256>;
};
// NVFP4 by block-scaled mma.sync. The output is fp32.
struct Sm120Dense : Consumers {
  static constexpr char kName[] = "sm120_dense";
  using D = float;
};
struct Sm120Fp4Output : Consumers {
  static constexpr char kName[] = "sm120_fp4_output";
  using D = E2m1;
};
struct Sm120Grouped : Consumers {
  static constexpr char kName[] = "sm120_grouped";
  using Schedule = KernelPtrArrayTmaWarpSpecializedCooperative;
  static constexpr bool kGrouped = true;
};
// Each consumer warpgroup has its own tile; they alternate.
struct Sm120GroupedPingpong : Consumers {
  static constexpr char kName[] = "sm120_grouped_pingpong";
  using Schedule = KernelPtrArrayTmaWarpSpecializedPingpong;
  static constexpr bool kGrouped = true;
};

}  // namespace

#define JOINED(name) k##name
#define CONSTANT(name) JOINED(name)
extern const Kernel CONSTANT(PTXEMU_KERNEL) = entry<PTXEMU_KERNEL>();

}  // namespace cutlass_oracle
