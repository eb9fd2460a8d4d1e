#include "backend/cuda/layer.h"

#include "backend/cuda/device/device.h"
#include "backend/cuda/router/router.h"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kLeastCapability = 80;  // for bf16 tensor cores and cp.async
// route's counters of one slice fill 48 KiB of shared memory, less 1 KiB
constexpr int64_t kMaxExperts = 12032;

// A run of that many aligned bf16 tokens, for sizes and descriptions.
RunPlan default_run(const Architecture& architecture, const MoeConfig& config,
                    const ExpertRange& range, const Plan& plan, int64_t tokens) {
  return make_run_plan(architecture.gemms, config, range, plan.device, {.tokens = tokens},
                       plan.limits);
}

void take_arrays(const Architecture& architecture, const MoeConfig& config,
                 const ExpertRange& range, const RunPlan& run, Arena& arena) {
  layer_buffers(config, range, run.tokens, arena);
  architecture.take_scratch(config, range, run, arena);
}

}  // namespace

constinit const DeviceMemory kMemory = {to_device,  to_host,  synchronize,
                                        capture_id, allocate, gather_rows};

bool has_code_for_11() {
#ifdef NVFP4_MOE_CODE_FOR_11
  return true;
#else
  return false;
#endif
}

bool has_code_for_thor() {
#ifdef NVFP4_MOE_THOR
  return true;
#else
  return false;
#endif
}

Status supports_device(const DeviceFacts& device) {
  if (device.kind != DeviceKind::kCuda)
    return unsupported("device: expected a CUDA device, got " + device.name);
  if (device.compute_capability / 10 == 11 && !has_code_for_11())
    return unsupported(
        "device: expected a build with code for compute capability 11.x (nvcc 13.0 or later, "
        "-DCMAKE_CUDA_ARCHITECTURES=\"100;110;120\"), got " +
        device.name + "; device cpu runs it");
  if (device.compute_capability >= kLeastCapability) return {};
  return unsupported("device: expected compute capability 8.0 or higher, got " +
                     std::to_string(device.compute_capability / 10) + "." +
                     std::to_string(device.compute_capability % 10) + " (" + device.name +
                     "); device cpu runs it");
}

Status supports_config(const MoeConfig& config) {
  if (config->activation_format != ActivationFormat::kInt8Block) return {};
  return unsupported(
      "activation_format int8_block: int8 tensor cores have no scale per 16 elements; nvfp4, bf16 "
      "and fp8 run here");
}

Status decline_fp8(const MoeConfig& config) {
  if (config->activation_format != ActivationFormat::kFp8) return {};
  return unsupported(
      "activation_format fp8: expected nvfp4 or bf16, which this backend has GEMMs for; cuda runs "
      "fp8 here");
}

Result<Plan> make_plan(const Architecture& architecture, const MoeConfig& config,
                       const ExpertRange& range, const LayerScales& scales, const Limits& limits,
                       const DeviceFacts& device) {
  NVFP4_MOE_TRY(check_layer_limits(config, range, limits));
  NVFP4_MOE_TRY(resolve_activation_scales(config, scales).status());
  if (range.count > kMaxExperts)
    return unsupported("local experts: expected at most " + std::to_string(kMaxExperts) + ", got " +
                       std::to_string(range.count));
  const ActivationFormat format = config->activation_format;
  const bool quantized = quantizes(format),
             as_bf16 = architecture.gemms.operands.of(format) == Operand::kBf16;
  const std::string rows = quantized && as_bf16
                               ? std::string(to_string(format)) + "_and_bf16_operand"
                               : to_string(format);
  const std::string gemm = std::string(architecture.gemm_kind) +
                           (format == ActivationFormat::kNvfp4 ? "_w4a4"
                            : quantized                        ? "_w4a8"
                                                               : "_w4a16") +
                           (quantized && as_bf16 ? "_as_bf16" : "");
  Plan plan{.backend = architecture.gemms.backend,
            .limits = limits,
            .device = device,
            .steps = {{"route", "counting_sort"},
                      {"quantize", rows},
                      {"gemm1_swiglu", gemm},
                      {"requantize", quantized ? rows : "none"},
                      {"gemm2", gemm},
                      {"combine", "fp32_fma_in_order"}},
            .workspace = {}};
  const RunPlan run = default_run(architecture, config, range, plan, limits.max_tokens);
  const auto walk = [&](Arena& arena) { take_arrays(architecture, config, range, run, arena); };
  plan.workspace = WorkspaceLayout::of(walk, limits.guard_bytes);
  return plan;
}

size_t workspace_bytes(const Architecture& architecture, const MoeConfig& config,
                       const ExpertRange& range, const Plan& plan, int64_t tokens) {
  Arena arena(nullptr, plan.limits.guard_bytes);
  take_arrays(architecture, config, range, default_run(architecture, config, range, plan, tokens),
              arena);
  return arena.size_bytes();
}

std::vector<StepPlan> describe_run(const Architecture& architecture, const MoeConfig& config,
                                   const ExpertRange& range, const Plan& plan, int64_t tokens) {
  return describe(architecture.gemms, config,
                  default_run(architecture, config, range, plan, tokens));
}

std::vector<int> gemm_tile_rows(const GemmTable& gemms) {
  std::vector<int> rows;
  for (const GemmConfig& gemm : gemms.configs)
    rows.push_back(gemm.wide < 0 ? gemm.tile_n
                                 : gemms.configs[static_cast<size_t>(gemm.wide)].tile_n);
  return rows;
}

Status run_route(const Architecture& architecture, const StepContext& step) {
  return route(step, architecture.counters(step));
}

Status run_quantize(const Architecture& architecture, const StepContext& step) {
  if (step.plan->scale_hidden) NVFP4_MOE_TRY(scale_hidden(step));
  NVFP4_MOE_TRY(step.plan->hidden.into_rows ? architecture.quantize_into_rows(step)
                                            : quantize(step));
  return step.plan->shared_hidden.kernel == QuantizeKernel::kNone ? Status()
                                                                  : quantize_shared_hidden(step);
}

Status run_layer(const Architecture& architecture, const PackedWeights& weights, const Plan& plan,
                 const Batch& batch, std::byte* workspace, const RunContext& context) {
  const DeviceGuard guard(weights.device);
  NVFP4_MOE_TRY(guard.status());
  const RunPlan run = make_run_plan(architecture.gemms, weights.config, weights.range, plan.device,
                                    RunFacts::of(batch), plan.limits);
  Arena arena(workspace, plan.limits.guard_bytes);
  LayerBuffers buffers = layer_buffers(weights.config, weights.range, batch.tokens, arena);
  if (context.status != nullptr) buffers.status = context.status;
  // The GEMMs read operands; codes are only for callers of single steps.
  for (PartBuffers* part : {&buffers.routed, &buffers.shared}) {
    part->hidden.codes = part->intermediate.codes = nullptr;
    part->hidden.fp8 = part->intermediate.fp8 = nullptr;
  }
  const StepContext step{weights, batch, buffers, serial_executor(), arena, context.stream, &run};
  if (run.selects) NVFP4_MOE_TRY(select_experts(weights.device, *batch.selection, context.stream));
  if (run.one_launch.ctas > 0) return architecture.run_in_one_launch(step);
  if (run.fused_route_quantize) {
    NVFP4_MOE_TRY(route_and_quantize(step, architecture.counters(step)));
  } else {
    NVFP4_MOE_TRY(run_route(architecture, step));
    NVFP4_MOE_TRY(run_quantize(architecture, step));
  }
  for (const PartBuffers* part : {&buffers.routed, &buffers.shared}) {
    if (part->experts == 0) continue;
    NVFP4_MOE_TRY(architecture.gemm1_swiglu(step, *part));
    NVFP4_MOE_TRY(requantize(step, *part));
    NVFP4_MOE_TRY(architecture.gemm2(step, *part));
  }
  return combine(step);
}

std::shared_ptr<const RunPlan> plan_single_steps(const Architecture& architecture,
                                                 const PackedWeights& weights, const Plan& plan,
                                                 const Batch& batch) {
  return std::make_shared<const RunPlan>(make_run_plan(architecture.gemms, weights.config,
                                                       weights.range, plan.device,
                                                       RunFacts::of(batch, true), plan.limits));
}

}  // namespace nvfp4_moe::internal::cuda
