// Several NVFP4 products in a launch, of one cta each tile: tensor maps that the kernel rewrites
// (tensormap.replace).
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm100Config {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_256>;
  using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100;
  using EpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm;
  static constexpr bool kGrouped = true;
};

}  // namespace

extern const Kernel kSm100Grouped = entry<Config>("sm100_grouped");

}  // namespace cutlass_oracle
