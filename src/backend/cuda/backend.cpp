// The plain CUDA backend's entry in the contract: every GPU from sm_80 up, mma.sync on bf16 operands. It is what runs
// where no backend knows the architecture better, and the partner that those are compared with.
#include "backend/backend.h"

#include "backend/cuda/device.h"
#include "backend/cuda/pack.h"
#include "backend/cuda/scratch.h"
#include "backend/cuda/steps.h"
#include "backend/host_layer.h"

namespace nvfp4_moe {
namespace cuda {
namespace {

constexpr int kLeastCapability = 80;     // bf16 tensor cores, cp.async
constexpr int64_t kMostExperts = 12288;  // route's counters of one chunk fill 48 KiB of shared memory

Status supports(const MoeConfig& config, const DeviceFacts& device) {
  if (device.kind != DeviceKind::kCuda) return unsupported("device: expected a CUDA device, got " + device.name);
  if (device.compute_capability < kLeastCapability)
    return unsupported("device: expected compute capability 8.0 or higher, got " +
                       std::to_string(device.compute_capability / 10) + "." +
                       std::to_string(device.compute_capability % 10) + " (" + device.name + ")");
  if (config->activation_format == ActivationFormat::kInt8Block)
    return unsupported(
        "activation_format int8_block: int8 tensor cores have no scale per 16 elements; nvfp4 and bf16 run here");
  return {};
}

Result<Plan> plan(const MoeConfig& config, const ExpertRange& range, const LayerScales& scales, const Limits& limits,
                  const DeviceFacts&) {
  NVFP4_MOE_TRY(check_host_limits(config, range, limits));
  NVFP4_MOE_TRY(resolve_activation_scales(config, scales).status());
  if (range.count > kMostExperts)
    return unsupported("local experts: expected at most " + std::to_string(kMostExperts) + ", got " +
                       std::to_string(range.count));
  const bool nvfp4 = config->activation_format == ActivationFormat::kNvfp4;
  const char* gemm = nvfp4 ? "mma_m16n8k16_w4a4_as_bf16" : "mma_m16n8k16_w4a16";
  const char* lines = nvfp4 ? "nvfp4_and_bf16_operand" : "bf16";
  Plan plan{.backend = "cuda", .limits = limits, .steps = {}, .workspace = host_layout(config, range, limits)};
  plan.workspace.add("cuda.scratch", Scratch(config, range, limits.max_tokens, nullptr).total_bytes);
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
  const DeviceGuard guard(weights.device);
  NVFP4_MOE_TRY(guard.status());
  HostBuffers buffers = host_buffers(weights.config, weights.range, workspace);
  if (context.status != nullptr) buffers.status = context.status;
  const int own_span = static_cast<int>(plan.workspace.spans().size()) - 1;
  const HostCall call{weights, batch, buffers, serial_executor(), workspace.at<std::byte>(own_span), context.stream};
  route(call);
  quantize(call);
  for (const HostPart* part : {&buffers.routed, &buffers.shared}) {
    if (part->experts == 0) continue;
    gemm1_swiglu(call, *part);
    requantize(call, *part);
    gemm2(call, *part);
  }
  combine(call);
  return check_launch("cuda: launch");
}

constexpr HostSteps kSteps = {route, quantize, gemm1_swiglu, requantize, gemm2, combine};
constexpr DeviceMemory kMemory = {to_device, to_host, synchronize, capture_id};

}  // namespace
}  // namespace cuda

constinit const Backend kCudaBackend = {
    .name = "cuda",
    .priority = 200,
    .supports = cuda::supports,
    .packed_bytes = cuda::packed_bytes,
    .allocate = cuda::allocate,
    .pack_expert = cuda::pack_expert,
    .unpack_expert = cuda::unpack_expert,
    .plan = cuda::plan,
    .run = cuda::run,
    .linear_bytes = nullptr,
    .linear_pack = nullptr,
    .linear_workspace_bytes = nullptr,
    .linear_run = nullptr,
    .steps = &cuda::kSteps,
    .memory = &cuda::kMemory,
};

}  // namespace nvfp4_moe
