// Launches gemm1_swiglu: derives its arguments from a step and selects the kernel (gemm1.cuh).
#include "backend/sm90/gather.h"
#include "backend/sm90/gemm_launch.h"
#include "backend/sm90/steps.h"

namespace nvfp4_moe::internal::sm90 {
namespace {

Gemm1Params gemm1_params(const StepContext& step, const PartBuffers& part, bool shared,
                         const cuda::GemmPlan& plan) {
  const MoeConfig& config = step.weights.config;
  Gemm1Params params{};
  params.tensor_scales = cuda::tensor_scales(step.weights, shared);
  params.row_scale = part.hidden.row_scale;  // null under bf16
  params.nonfinite = part.hidden.nonfinite;
  params.router_weights = config->router_weight == RouterWeight::kBeforeDown && !shared
                              ? step.batch.topk_weights
                              : nullptr;
  params.bias_table = cuda::gemm1_biases(step.weights, shared);
  params.function = cuda::gemm1_function(config->activation);
  if (params.function == cuda::Gemm1Function::kGeluOrSitu)
    params.gelu_or_situ = cuda::GeluOrSitu::from(config);
  else
    params.activation = GatedActivation::from(config);
  params.out = part.intermediate.bf16;
  params.channels = part.intermediate_size;
  if (plan.flags_nonfinite) params.nonfinite_rows = part.intermediate.nonfinite;
  return params;
}

}  // namespace

Status gemm1_swiglu(const StepContext& step, const PartBuffers& part) {
  if (step.batch.tokens == 0) return {};
  const cuda::GemmPlan& plan = cuda::plan_of(step, part).gemm1;
  const GemmPart of(step, part);
  const Scratch scratch(step);
  const auto args_of = [&](int index) {
    GemmArgs args = gemm_args(step, part, of, plan, index, of.layout.gate_up, scratch);
    args.weights = reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) + of.layout.offset;
    args.assignment_of_row = part.assignment_of_row;
    return args;
  };
  const GemmArgs args = args_of(plan.config);
  const Gemm1Params params = gemm1_params(step, part, of.shared, plan);
  const std::byte* const x = cuda::hidden_rows(step, part);  // (T, H)
  const int32_t bytes = row_bytes(step, step.weights.config->hidden_size);
  const KernelEntry& kernels = kernels_of(step, plan);
  const LaunchSite site = launch_site(step, plan);
  if (plan.wide >= 0)
    return kernels.gemm1_narrow_or_wide(site, args, args_of(plan.wide), params, {x, bytes});
  switch (plan.rows) {
    case cuda::RowSource::kGathered: return kernels.gemm1(site, args, params, {x, bytes});
    case cuda::RowSource::kFusedRouting: {
      const auto* const own =
          plan.early_hidden ? static_cast<const std::byte*>(step.batch.hidden) : x;
      return kernels.gemm1_fused_routing(
          site, args, params, {own, bytes, plan.early_hidden, cuda::assignment_ids(step)});
    }
    case cuda::RowSource::kGatheredFirst:
      NVFP4_MOE_TRY(gather_rows(step, part, x));
      [[fallthrough]];
    case cuda::RowSource::kInRows: break;
  }
  // The shared expert's rows are the tokens.
  NVFP4_MOE_ASSIGN(const TmaRows rows, tma_rows(of.shared ? x : gathered(part), of.rows, bytes));
  return kernels.gemm1_tma(site, args, params, rows);
}

}  // namespace nvfp4_moe::internal::sm90
