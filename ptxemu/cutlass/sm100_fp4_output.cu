// NVFP4 in and out: the epilogue makes E2M1 codes and their scales.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm100Config {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_256>;
  using D = E2m1;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecialized1SmNvf4Sm100;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized1Sm;
};

}  // namespace

extern const Kernel kSm100Fp4Output = entry<Config>("sm100_fp4_output");

}  // namespace cutlass_oracle
