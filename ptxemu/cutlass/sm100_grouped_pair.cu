// Several NVFP4 products in a launch, by pairs of ctas.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm100Config {
  using Tile = cute::Shape<cute::_256, cute::_128, cute::_256>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmNvf4Sm100;
  using EpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecialized2Sm;
  static constexpr bool kGrouped = true;
};

}  // namespace

extern const Kernel kSm100GroupedPair = entry<Config>("sm100_grouped_pair");

}  // namespace cutlass_oracle
