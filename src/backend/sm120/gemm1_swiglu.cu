// gemm1_swiglu: hidden (T, H) as FP4 operand, joined gate/up tiles (or up tiles) ->
// part.intermediate.bf16 (R, I).
#include "backend/sm120/gemm_launch.cuh"
#include "backend/sm120/steps.h"

namespace nvfp4_moe::internal::sm120 {
namespace {

template <size_t kIndex, class Epilogue>
__global__ void __launch_bounds__(GemmTraits<kIndex>::kThreads, 1)
    sm120_gemm1_kernel(const __grid_constant__ GemmArgs args,
                       const __grid_constant__ Epilogue epilogue) {
  gemm<GemmTraits<kIndex>>(args, epilogue);
}
template <class Epilogue>
struct Gemm1Kernels {
  static constexpr const char* kName = "gemm1_swiglu";
  template <size_t kIndex>
  static constexpr auto kKernel = sm120_gemm1_kernel<kIndex, Epilogue>;
};

}  // namespace

Status gemm1_swiglu(const StepContext& step, const PartBuffers& part) {
  return cuda::fp4::gemm1_swiglu<Room, Gemm1Kernels>(step, part);
}

}  // namespace nvfp4_moe::internal::sm120
