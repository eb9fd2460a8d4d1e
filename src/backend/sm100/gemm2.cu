// gemm2: part.intermediate (R, I) as FP4 operand, down tiles -> part.rows_out (R, H) in row_format.
#include "backend/sm100/gemm_launch.cuh"
#include "backend/sm100/steps.h"

namespace nvfp4_moe::internal::sm100 {
namespace {

template <size_t kIndex>
__global__ void __launch_bounds__(GemmTraits<kIndex>::kThreads, 1)
    sm100_gemm2_kernel(const __grid_constant__ GemmArgs args,
                       const __grid_constant__ DownEpilogue epilogue) {
  gemm<GemmTraits<kIndex>>(args, epilogue);
}
struct Gemm2Kernels {
  static constexpr const char* kName = "gemm2";
  template <size_t kIndex>
  static constexpr auto kKernel = sm100_gemm2_kernel<kIndex>;
};

}  // namespace

Status gemm2(const StepContext& step, const PartBuffers& part) {
  return cuda::fp4::gemm2<Room, Gemm2Kernels>(step, part);
}

}  // namespace nvfp4_moe::internal::sm100
