// The Hopper backend's entry in the contract: wgmma kernels for both GEMMs; memory, packed layout, routing,
// quantization and combine are backend/cuda's.
#include "backend/backend.h"

#include "backend/cuda/device.h"
#include "backend/cuda/pack.h"
#include "backend/cuda/steps.h"
#include "backend/host_layer.h"
#include "backend/sm90/scratch.h"
#include "backend/sm90/steps.h"

namespace nvfp4_moe {
namespace sm90 {
namespace {

Status supports(const MoeConfig& config, const DeviceFacts& device) {
  if (device.kind != DeviceKind::kCuda) return unsupported("device: expected a CUDA device, got " + device.name);
  if (device.compute_capability / 10 != 9)
    return unsupported("device: expected compute capability 9.x, whose wgmma later GPUs do not have, got " +
                       std::to_string(device.compute_capability / 10) + "." +
                       std::to_string(device.compute_capability % 10) + " (" + device.name + ")");
  return kCudaBackend.supports(config, device);
}

Result<Plan> plan(const MoeConfig& config, const ExpertRange& range, const LayerScales& scales, const Limits& limits,
                  const DeviceFacts& device) {
  NVFP4_MOE_TRY(kCudaBackend.plan(config, range, scales, limits, device).status());
  const bool nvfp4 = config->activation_format == ActivationFormat::kNvfp4;
  const char* lines = nvfp4 ? "nvfp4_and_bf16_operand" : "bf16";
  const std::string gemm =
      std::string(kVariants[routed_variant(config, limits.max_tokens)].name) + (nvfp4 ? "_w4a4_as_bf16" : "_w4a16");
  Plan plan{.backend = "sm90", .limits = limits, .steps = {}, .workspace = host_layout(config, range, limits)};
  plan.workspace.add("sm90.scratch", Scratch(config, range, limits.max_tokens, nullptr).total_bytes);
  plan.steps = {{"route", "counting_sort"},
                {"quantize", lines},
                {"gemm1_swiglu", gemm},
                {"requantize", nvfp4 ? lines : "none"},
                {"gemm2", gemm},
                {"combine", "fp32_fma_in_order"}};
  return plan;
}

Status run(const PackedWeights& weights, const Plan& plan, const Batch& batch, const Workspace& workspace,
           const RunContext& context) {
  const cuda::DeviceGuard guard(weights.device);
  NVFP4_MOE_TRY(guard.status());
  HostBuffers buffers = host_buffers(weights.config, weights.range, workspace);
  if (context.status != nullptr) buffers.status = context.status;
  const int own_span = static_cast<int>(plan.workspace.spans().size()) - 1;
  const HostCall call{weights, batch, buffers, serial_executor(), workspace.at<std::byte>(own_span), context.stream};
  route(call);
  cuda::quantize(call);
  for (const HostPart* part : {&buffers.routed, &buffers.shared}) {
    if (part->experts == 0) continue;
    gemm1_swiglu(call, *part);
    cuda::requantize(call, *part);
    gemm2(call, *part);
  }
  cuda::combine(call);
  return cuda::check_launch("sm90: launch");
}

constexpr HostSteps kSteps = {route, cuda::quantize, gemm1_swiglu, cuda::requantize, gemm2, cuda::combine};
constexpr DeviceMemory kMemory = {cuda::to_device, cuda::to_host, cuda::synchronize, cuda::capture_id};

}  // namespace
}  // namespace sm90

constinit const Backend kSm90Backend = {
    .name = "sm90",
    .priority = 300,
    .supports = sm90::supports,
    .packed_bytes = cuda::packed_bytes,
    .allocate = cuda::allocate,
    .pack_expert = cuda::pack_expert,
    .unpack_expert = cuda::unpack_expert,
    .plan = sm90::plan,
    .run = sm90::run,
    .linear_bytes = nullptr,
    .linear_pack = nullptr,
    .linear_workspace_bytes = nullptr,
    .linear_run = nullptr,
    .steps = &sm90::kSteps,
    .memory = &sm90::kMemory,
};

}  // namespace nvfp4_moe
