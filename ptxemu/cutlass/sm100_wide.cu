// NVFP4 tiles of 192 columns by pairs of ctas: B's scales are copied for 256, and every second tile
// begins within a tile of scales.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm100Config {
  using Tile = cute::Shape<cute::_256, cute::Int<192>, cute::_256>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecialized2SmNvf4Sm100;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized2Sm;
};

}  // namespace

extern const Kernel kSm100Wide = entry<Config>("sm100_wide");

}  // namespace cutlass_oracle
