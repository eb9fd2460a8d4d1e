// gemm1_swiglu: hidden (T, H) as FP4 operand, joined gate/up tiles -> part.intermediate.bf16 (R, I).
#include "backend/sm120/gemm_launch.cuh"
#include "backend/sm120/steps.h"

namespace nvfp4_moe::sm120 {
namespace {

template <size_t kIndex>
__global__ void __launch_bounds__(GemmTraits<kIndex>::kThreads, 1)
    sm120_gemm1_kernel(const __grid_constant__ GemmArgs args, const __grid_constant__ SwigluEpilogue epilogue) {
  gemm<GemmTraits<kIndex>>(args, epilogue);
}
struct Kernels {
  static constexpr const char* kName = "gemm1_swiglu";
  template <size_t kIndex>
  static constexpr auto kKernel = sm120_gemm1_kernel<kIndex>;
};

}  // namespace

Status gemm1_swiglu(const StepContext& step, const PartBuffers& part) {
  if (step.batch.tokens == 0) return {};
  const MoeConfig& config = step.weights.config;
  const cuda::GemmPlan& plan = cuda::plan_of(step, part).gemm1;
  const GemmPart of(step, part);
  const Scratch scratch(step);
  const std::byte* const x = of.shared ? scratch.common.shared_hidden_operand : scratch.common.hidden_operand;
  GemmArgs args = gemm_args(step, part, of, plan, of.layout.gate_up, x, config->hidden_size);
  args.weights = of.weights(step, 0);
  args.assignment_of_row = part.assignment_of_row;
  SwigluEpilogue epilogue{};
  epilogue.tensor_scales = cuda::tensor_scales(step.weights, of.shared);
  epilogue.row_scale = part.hidden.row_scale;
  epilogue.router_weights =
      config->router_weight == RouterWeight::kBeforeDown && !of.shared ? step.batch.topk_weights : nullptr;
  epilogue.activation = cuda::GatedActivation::from(config);
  epilogue.out = part.intermediate.bf16;
  epilogue.channels = part.intermediate_size;
  return launch_gemm<Kernels>(plan, step.stream, args, epilogue);
}

}  // namespace nvfp4_moe::sm120
