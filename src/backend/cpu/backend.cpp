// The CPU backend's entry in the contract. Portable C++; what it does not take, it declines with a reason.
#include "backend/backend.h"

#include "backend/cpu/linear.h"
#include "backend/cpu/pack.h"
#include "backend/cpu/steps.h"
#include "backend/host_layer.h"

namespace nvfp4_moe {
namespace cpu {
namespace {

Status supports(const MoeConfig&, const DeviceFacts& device) {
  if (device.kind != DeviceKind::kCpu) return unsupported("device: expected a CPU, got " + device.name);
  return {};
}

Result<Plan> plan(const MoeConfig& config, const ExpertRange& range, const LayerScales& scales, const Limits& limits,
                  const DeviceFacts&) {
  NVFP4_MOE_TRY(check_host_limits(config, range, limits));
  NVFP4_MOE_TRY(resolve_activation_scales(config, scales).status());
  const std::string gemm = std::string("portable_16x16_") + to_string(config->activation_format);
  Plan plan{.backend = "cpu", .limits = limits, .steps = {}, .workspace = host_layout(config, range, limits)};
  plan.steps = {{"route", "counting_sort"},
                {"quantize", "blocks_of_16"},
                {"gemm1_swiglu", gemm},
                {"requantize", "blocks_of_16"},
                {"gemm2", gemm},
                {"combine", "fma_in_k_order"}};
  return plan;
}

// The layer, a line a step.
Status run(const PackedWeights& weights, const Plan&, const Batch& batch, const Workspace& workspace,
           const RunContext& context) {
  const HostBuffers buffers = host_buffers(weights.config, weights.range, workspace);
  const HostCall call{weights, batch, buffers, *context.executor};
  route(call);
  quantize(call);
  for (const HostPart* part : {&buffers.routed, &buffers.shared}) {
    if (part->experts == 0) continue;
    gemm1_swiglu(call, *part);
    requantize(call, *part);
    gemm2(call, *part);
  }
  combine(call);
  return {};
}

constexpr HostSteps kSteps{route, quantize, gemm1_swiglu, requantize, gemm2, combine};

}  // namespace
}  // namespace cpu

const Backend kCpuBackend{
    .name = "cpu",
    .priority = 10,
    .supports = cpu::supports,
    .packed_bytes = cpu::packed_bytes,
    .allocate = allocate_pages,
    .pack_expert = cpu::pack_expert,
    .unpack_expert = cpu::unpack_expert,
    .plan = cpu::plan,
    .run = cpu::run,
    .linear_bytes = cpu::linear_bytes,
    .linear_pack = cpu::linear_pack,
    .linear_workspace_bytes = cpu::linear_workspace_bytes,
    .linear_run = cpu::linear_run,
    .steps = &cpu::kSteps,
};

}  // namespace nvfp4_moe
