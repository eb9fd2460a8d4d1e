// gemm2: part.intermediate (R, I) as FP4 operand, down tiles -> part.rows_out (R, H) in row_format.
#include "backend/sm120/gemm_launch.cuh"
#include "backend/sm120/steps.h"

namespace nvfp4_moe::sm120 {
namespace {

template <size_t kIndex>
__global__ void __launch_bounds__(GemmTraits<kIndex>::kThreads, 1)
    sm120_gemm2_kernel(const __grid_constant__ GemmArgs args, const __grid_constant__ DownEpilogue epilogue) {
  gemm<GemmTraits<kIndex>>(args, epilogue);
}
struct Kernels {
  static constexpr const char* kName = "gemm2";
  template <size_t kIndex>
  static constexpr auto kKernel = sm120_gemm2_kernel<kIndex>;
};

// (R, K); a linear has it where codes are.
const std::byte* operand_of(const StepContext& step, const PartBuffers& part, bool shared) {
  if (part.down_only) return reinterpret_cast<const std::byte*>(part.intermediate.codes);
  const Scratch scratch(step);
  return shared ? scratch.common.shared_operand : scratch.common.routed_operand;
}

}  // namespace

Status gemm2(const StepContext& step, const PartBuffers& part) {
  if (step.batch.tokens == 0) return {};
  const MoeConfig& config = step.weights.config;
  const cuda::GemmPlan& plan = cuda::plan_of(step, part).gemm2;
  const GemmPart of(step, part);
  GemmArgs args =
      gemm_args(step, part, of, plan, of.layout.down, operand_of(step, part, of.shared), part.intermediate_size);
  args.weights = of.weights(step, part.down_only ? 0 : of.layout.gate_up.bytes());
  DownEpilogue epilogue{};
  epilogue.tensor_scales = cuda::tensor_scales(step.weights, of.shared);
  epilogue.row_scale = part.intermediate.row_scale;
  epilogue.out = part.rows_out;
  epilogue.out_fp32 = config->row_format == RowFormat::kFp32;
  epilogue.channels = config->hidden_size;
  return launch_gemm<Kernels>(plan, step.stream, args, epilogue);
}

}  // namespace nvfp4_moe::sm120
