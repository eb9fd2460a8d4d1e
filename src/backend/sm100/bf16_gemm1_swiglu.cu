// gemm1_swiglu: hidden (T, H) in bf16, joined gate/up tiles (or up tiles) -> part.intermediate.bf16
// (R, I).
#include "backend/sm100/gemm_launch.cuh"
#include "backend/sm100/steps.h"

namespace nvfp4_moe::internal::sm100 {
namespace {

template <size_t kIndex, class Epilogue>
__global__ void __launch_bounds__(Bf16Traits<kIndex>::kThreads, 1)
    sm100_bf16_gemm1_kernel(const __grid_constant__ GemmArgs args,
                            const __grid_constant__ Epilogue epilogue) {
  bf16_gemm<Bf16Traits<kIndex>>(args, epilogue);
}
template <class Epilogue>
struct Bf16Gemm1Kernels {
  static constexpr const char* kName = "gemm1_swiglu";
  template <size_t kIndex>
  static constexpr auto kKernel = sm100_bf16_gemm1_kernel<kIndex, Epilogue>;
};

}  // namespace

Status bf16_gemm1_swiglu(const StepContext& step, const PartBuffers& part) {
  return cuda::fp4::gemm1_swiglu<Bf16Room, Bf16Gemm1Kernels>(step, part);
}

}  // namespace nvfp4_moe::internal::sm100
