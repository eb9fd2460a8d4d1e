// NVFP4 in and out: the epilogue makes E2M1 codes and their scales.
#include "gemm.cuh"

namespace cutlass_oracle {
namespace {

struct Config : Sm120Config {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
  using D = E2m1;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
};

}  // namespace

extern const Kernel kSm120Fp4Output = entry<Config>("sm120_fp4_output");

}  // namespace cutlass_oracle
