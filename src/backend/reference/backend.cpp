// The reference backend, which defines the layer on a host. Supports every valid config; chosen
// last.
#include "backend/backend.h"

#include "backend/layer_steps.h"
#include "backend/reference/steps.h"

namespace nvfp4_moe::internal {
namespace reference {
namespace {

constexpr LayerSteps kSteps = {succeed<route>,
                               succeed<quantize>,
                               succeed<gemm1_swiglu, const PartBuffers>,
                               succeed<requantize, const PartBuffers>,
                               succeed<gemm2, const PartBuffers>,
                               succeed<combine>};

Status supports(const MoeConfig&, const DeviceFacts& device) {
  if (device.kind != DeviceKind::kCpu)
    return unsupported("reference: expected host memory, got a " + device.name);
  return {};
}

Result<Plan> plan(const MoeConfig& config, const ExpertRange& range, const LayerScales& scales,
                  const Limits& limits, const DeviceFacts& device) {
  NVFP4_MOE_TRY(check_layer_limits(config, range, limits));
  NVFP4_MOE_TRY(resolve_activation_scales(config, scales).status());
  const bool bf16 = config->activation_format == ActivationFormat::kBf16;
  const bool row_scales = row_scale_range(config->activation_format) > 0;
  const char* rows = row_scales ? "per row" : "per block";
  const char* dots = bf16         ? "double, one rounding"
                     : row_scales ? "int64 exact, one rounding"
                                  : "wide integer exact, one rounding";
  Plan plan;
  plan.backend = "reference";
  plan.limits = limits;
  plan.steps = {{"route", "stable count sort"},
                {"quantize", bf16 ? "round to bf16" : rows},
                {"gemm1_swiglu", dots},
                {"requantize", bf16 ? "none" : rows},
                {"gemm2", dots},
                {"combine", "fp32 fma, increasing k"}};
  plan.device = device;
  plan.workspace = WorkspaceLayout::of(
      [&](Arena& arena) { layer_buffers(config, range, limits.max_tokens, arena); },
      limits.guard_bytes);
  return plan;
}

size_t workspace_bytes(const MoeConfig& config, const ExpertRange& range, const Plan& plan,
                       int64_t tokens) {
  Arena arena(nullptr, plan.limits.guard_bytes);
  layer_buffers(config, range, tokens, arena);
  return arena.size_bytes();
}

}  // namespace
}  // namespace reference

const Backend kReferenceBackend = {
    .name = "reference",
    .priority = 0,
    .supports = reference::supports,
    .packed_bytes = reference::packed_bytes,
    .allocate = allocate_host,
    .pack_expert = reference::pack_expert,
    .unpack_expert = reference::unpack_expert,
    .plan = reference::plan,
    .run = reference::run,
    .workspace_bytes = reference::workspace_bytes,
    .linear_bytes = reference::linear_bytes,
    .linear_pack = reference::linear_pack,
    .linear_workspace_bytes = reference::linear_workspace_bytes,
    .linear_run = reference::linear_run,
    .steps = &reference::kSteps,
};

}  // namespace nvfp4_moe::internal
