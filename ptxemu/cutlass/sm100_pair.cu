// NVFP4 of pairs of ctas (cta_group::2) in clusters of eight: multicast, commits to several ctas.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm100Config {
  using Tile = cute::Shape<cute::_256, cute::_128, cute::_256>;
  using Cluster = cute::Shape<cute::_4, cute::_2, cute::_1>;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecialized2SmNvf4Sm100;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized2Sm;
};

}  // namespace

extern const Kernel kSm100Pair = entry<Config>("sm100_pair");

}  // namespace cutlass_oracle
