// Several NVFP4 products in a launch, two consumer warpgroups on a tile; the kernel rewrites tensor
// maps.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm120Config {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
  using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  static constexpr bool kGrouped = true;
};

}  // namespace

extern const Kernel kSm120Grouped = entry<Config>("sm120_grouped");

}  // namespace cutlass_oracle
