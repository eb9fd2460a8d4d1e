// bf16 of one cta by kind::f16.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm100Config {
  using Operand = Bf16;
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_64>;
  using D = float;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecialized1SmSm100;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized1Sm;
};

}  // namespace

extern const Kernel kSm100Bf16 = entry<Config>("sm100_bf16");

}  // namespace cutlass_oracle
