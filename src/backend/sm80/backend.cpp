// The plain CUDA backend's entry in the contract: every GPU from sm_80 up, mma.sync on bf16 operands. It is what runs
// where no backend knows the architecture better, and the partner that those are compared with.
#include "backend/backend.h"

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/measure.h"
#include "backend/cuda/layer.h"
#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/format.h"
#include "backend/cuda/steps/linear.h"
#include "backend/cuda/steps/pack.h"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe {
namespace cuda {
namespace {

constexpr DeviceMeasures kMeasures = {time_graph, read_rate, product_rate, "mma.sync m16n8k16"};
constexpr LayerSteps kSteps = {route, quantize, gemm1_swiglu, requantize, gemm2, combine};

Status supports(const MoeConfig& config, const DeviceFacts& device) {
  NVFP4_MOE_TRY(supports_device(device));
  return supports_config(config);
}

void take_scratch(const MoeConfig& config, const ExpertRange& range, int64_t tokens, Arena& arena) {
  Scratch(config, range, tokens, arena);
}
size_t workspace_bytes(const MoeConfig& config, const ExpertRange& range, const Plan& plan, int64_t tokens) {
  return cuda::workspace_bytes(take_scratch, config, range, plan, tokens);
}

Result<Plan> plan(const MoeConfig& config, const ExpertRange& range, const LayerScales& scales, const Limits& limits,
                  const DeviceFacts& device) {
  const bool nvfp4 = config->activation_format == ActivationFormat::kNvfp4;
  return make_plan("cuda", nvfp4 ? "mma_m16n8k16_w4a4_as_bf16" : "mma_m16n8k16_w4a16", take_scratch, config, range,
                   scales, limits, device);
}

Status run(const PackedWeights& weights, const Plan& plan, const Batch& batch, std::byte* workspace,
           const RunContext& context) {
  return cuda::run_layer(kSteps, tiling, weights, plan, batch, workspace, context);
}

constexpr LinearSteps kLinear = {gemm2, tiling, take_scratch};
size_t bytes_of_linear(const LinearWeights& weights, int64_t max_tokens) {
  return cuda::linear_workspace_bytes(kLinear, weights, max_tokens);
}
Status run_linear(const LinearWeights& weights, const LinearBatch& batch, std::byte* workspace,
                  const RunContext& context) {
  return cuda::linear_run(kLinear, weights, batch, workspace, context);
}

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
    .workspace_bytes = cuda::workspace_bytes,
    .linear_bytes = cuda::linear_bytes,
    .linear_pack = cuda::linear_pack,
    .linear_workspace_bytes = cuda::bytes_of_linear,
    .linear_run = cuda::run_linear,
    .steps = &cuda::kSteps,
    .memory = &cuda::kMemory,
    .measures = &cuda::kMeasures,
    .formats = &cuda::kFormats,
};

}  // namespace nvfp4_moe
