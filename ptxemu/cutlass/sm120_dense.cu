// NVFP4 by block-scaled mma.sync, two consumer warpgroups on a tile. The output is fp32.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm120Config {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
  using D = float;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
};

}  // namespace

extern const Kernel kSm120Dense = entry<Config>("sm120_dense");

}  // namespace cutlass_oracle
