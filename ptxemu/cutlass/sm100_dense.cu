// NVFP4 of one cta: tcgen05.cp of scales, tcgen05.mma, tensor copies, clusterlaunchcontrol. The
// output is fp32.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm100Config {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_256>;
  using D = float;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecialized1SmNvf4Sm100;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized1Sm;
};

}  // namespace

extern const Kernel kSm100Dense = entry<Config>("sm100_dense");

}  // namespace cutlass_oracle
