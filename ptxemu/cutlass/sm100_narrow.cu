// NVFP4 tiles of 64 columns: two tiles share a tile of B's scales, of which every second one takes
// the later half.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm100Config {
  using Tile = cute::Shape<cute::_128, cute::_64, cute::_256>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecialized1SmNvf4Sm100;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized1Sm;
};

}  // namespace

extern const Kernel kSm100Narrow = entry<Config>("sm100_narrow");

}  // namespace cutlass_oracle
