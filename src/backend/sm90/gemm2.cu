// gemm2's launch: what it takes from a step, and which kernel (gemm2.cuh).
#include "backend/sm90/gemm_launch.h"
#include "backend/sm90/steps.h"

namespace nvfp4_moe::sm90 {

Status gemm2(const StepContext& step, const PartBuffers& part) {
  if (step.batch.tokens == 0) return {};
  const MoeConfig& config = step.weights.config;
  const cuda::GemmPlan& plan = cuda::plan_of(step, part).gemm2;
  const GemmPart of(step, part);
  const Scratch scratch(step);
  GemmArgs args = gemm_args(step, part, of, plan, of.layout.down, scratch);
  args.weights = reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) + of.layout.offset +
                 (part.down_only ? 0 : of.layout.gate_up.bytes());
  Gemm2Params params{};
  params.tensor_scales = cuda::tensor_scales(step.weights, of.shared);
  params.row_scale = part.intermediate.row_scale;  // null under bf16, but for a linear
  params.out = part.rows_out;
  params.out_fp32 = config->row_format == RowFormat::kFp32;
  params.channels = config->hidden_size;
  const std::byte* const x = cuda::intermediate_rows(step, part);  // (R, I)
  const int32_t bytes = row_bytes(step, part.intermediate_size);
  const KernelEntry& kernels = kernels_of(step, plan);
  const LaunchSite site = launch_site(step, plan);
  if (plan.rows == cuda::RowSource::kGathered) return kernels.gemm2(site, args, params, {x, bytes});
  NVFP4_MOE_ASSIGN(const TmaRows rows, tma_rows(x, of.rows, bytes));
  return kernels.gemm2_tma(site, args, params, rows);
}

}  // namespace nvfp4_moe::sm90
