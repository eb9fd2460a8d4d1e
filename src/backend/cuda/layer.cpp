#include "backend/cuda/layer.h"

#include "backend/cuda/device/device.h"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::cuda {
namespace {

constexpr int kLeastCapability = 80;     // bf16 tensor cores, cp.async
constexpr int64_t kMostExperts = 12032;  // route's counters of one chunk fill 48 KiB of shared memory, less 1 KiB

}  // namespace

constinit const DeviceMemory kMemory = {to_device, to_host, synchronize, capture_id};

Status supports_device(const DeviceFacts& device) {
  if (device.kind != DeviceKind::kCuda) return unsupported("device: expected a CUDA device, got " + device.name);
  if (device.compute_capability >= kLeastCapability) return {};
  return unsupported("device: expected compute capability 8.0 or higher, got " +
                     std::to_string(device.compute_capability / 10) + "." +
                     std::to_string(device.compute_capability % 10) + " (" + device.name + ")");
}

Status supports_config(const MoeConfig& config) {
  if (config->activation_format != ActivationFormat::kInt8Block) return {};
  return unsupported(
      "activation_format int8_block: int8 tensor cores have no scale per 16 elements; nvfp4 and bf16 run here");
}

Result<Plan> make_plan(const char* backend, const std::string& gemm, TakeScratch take_scratch, const MoeConfig& config,
                       const ExpertRange& range, const LayerScales& scales, const Limits& limits,
                       const DeviceFacts& device) {
  NVFP4_MOE_TRY(check_layer_limits(config, range, limits));
  NVFP4_MOE_TRY(resolve_activation_scales(config, scales).status());
  if (range.count > kMostExperts)
    return unsupported("local experts: expected at most " + std::to_string(kMostExperts) + ", got " +
                       std::to_string(range.count));
  const bool nvfp4 = config->activation_format == ActivationFormat::kNvfp4;
  const char* lines = nvfp4 ? "nvfp4_and_bf16_operand" : "bf16";
  const auto walk = [&](Arena& arena) {
    layer_buffers(config, range, limits.max_tokens, arena);
    take_scratch(config, range, limits.max_tokens, arena);
  };
  Plan plan{.backend = backend,
            .limits = limits,
            .device = device,
            .steps = {},
            .workspace = WorkspaceLayout::of(walk, limits.guard_bytes)};
  plan.steps = {{"route", "counting_sort"},
                {"quantize", lines},
                {"gemm1_swiglu", gemm},
                {"requantize", nvfp4 ? lines : "none"},
                {"gemm2", gemm},
                {"combine", "fp32_fma_in_order"}};
  return plan;
}

size_t workspace_bytes(TakeScratch take_scratch, const MoeConfig& config, const ExpertRange& range, const Plan& plan,
                       int64_t tokens) {
  Arena arena(nullptr, plan.limits.guard_bytes);
  layer_buffers(config, range, tokens, arena);
  take_scratch(config, range, tokens, arena);
  return arena.size_bytes();
}

Status run_layer(const LayerSteps& steps, Tiling (*tiling)(const StepContext&), const PackedWeights& weights,
                 const Plan& plan, const Batch& batch, std::byte* workspace, const RunContext& context) {
  const DeviceGuard guard(weights.device);
  NVFP4_MOE_TRY(guard.status());
  Arena arena(workspace, plan.limits.guard_bytes);
  LayerBuffers buffers = layer_buffers(weights.config, weights.range, batch.tokens, arena);
  if (context.status != nullptr) buffers.status = context.status;
  // The GEMMs read operands: codes are for those who take a step by itself.
  buffers.hidden.codes = buffers.routed.intermediate.codes = buffers.shared.intermediate.codes = nullptr;
  const StepContext step{weights, batch, buffers, serial_executor(), arena, context.stream};
  if (routes_and_quantizes_at_once(step)) {
    route_and_quantize(step, tiling(step));
  } else {
    steps.route(step);
    steps.quantize(step);
  }
  for (const PartBuffers* part : {&buffers.routed, &buffers.shared}) {
    if (part->experts == 0) continue;
    steps.gemm1_swiglu(step, *part);
    if (weights.config->activation_format == ActivationFormat::kNvfp4) steps.requantize(step, *part);
    steps.gemm2(step, *part);
  }
  combine_and_count(step, tiling(step));
  return check_launch("launch");
}

}  // namespace nvfp4_moe::cuda
