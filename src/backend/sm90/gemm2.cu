// Launches gemm2: derives its arguments from a step and selects the kernel (gemm2.cuh).
#include "backend/cuda/steps/quantize.cuh"
#include "backend/sm90/gemm_launch.h"
#include "backend/sm90/steps.h"

namespace nvfp4_moe::internal::sm90 {

Status gemm2(const StepContext& step, const PartBuffers& part) {
  if (step.batch.tokens == 0) return {};
  const MoeConfig& config = step.weights.config;
  const cuda::PartPlan& part_plan = cuda::plan_of(step, part);
  const cuda::GemmPlan& plan = part_plan.gemm2;
  const GemmPart of(step, part);
  const Scratch scratch(step);
  const auto args_of = [&](int index) {
    GemmArgs args = gemm_args(step, part, of, plan, index, of.layout.down, scratch);
    args.weights = reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) + of.layout.offset +
                   (part.down_only ? 0 : of.layout.gate_up.bytes());
    return args;
  };
  const GemmArgs args = args_of(plan.config);
  Gemm2Params params{};
  params.tensor_scales = cuda::tensor_scales(step.weights, of.shared);
  params.row_scale = part.intermediate.row_scale;  // null under bf16, except in a linear
  params.bias_table = cuda::down_biases(step.weights, of.shared);
  params.out = part.rows_out;
  params.out_fp32 = config->row_format == RowFormat::kFp32;
  params.channels = config->hidden_size;
  const KernelEntry& kernels = kernels_of(step, plan);
  const LaunchSite site = launch_site(step, plan);
  if (part_plan.requantize.kernel == cuda::QuantizeKernel::kByGemm2) {
    const cuda::RowArgs rows = cuda::intermediate_args(step, part);
    return kernels.gemm2_requantize(
        site, args, params,
        {part.intermediate.bf16, static_cast<int32_t>(rows.k), rows.rule, rows.counters});
  }
  const std::byte* const x = cuda::intermediate_rows(step, part);  // (R, I)
  const int32_t bytes = row_bytes(step, part.intermediate_size);
  const GatheredRows gathered_rows{x, bytes};
  if (plan.wide < 0 && plan.rows == cuda::RowSource::kGathered)
    return kernels.gemm2(site, args, params, gathered_rows);
  NVFP4_MOE_ASSIGN(const TmaRows rows, tma_rows(x, of.rows, bytes));
  if (plan.wide >= 0)
    return kernels.gemm2_narrow_or_wide(site, args, args_of(plan.wide), params, gathered_rows,
                                        rows);
  return kernels.gemm2_tma(site, args, params, rows);
}

}  // namespace nvfp4_moe::internal::sm90
