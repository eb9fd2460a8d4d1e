// Several NVFP4 products in a launch, each consumer warpgroup on a tile of its own, in turns.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm120Config {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
  using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  static constexpr bool kGrouped = true;
};

}  // namespace

extern const Kernel kSm120GroupedPingpong = entry<Config>("sm120_grouped_pingpong");

}  // namespace cutlass_oracle
