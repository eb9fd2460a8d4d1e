// Hopper's entry in the contract: the CUDA backend with GEMMs on wgmma.
#include "backend/backend.h"

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/measure.h"
#include "backend/cuda/layer.h"
#include "backend/cuda/steps/format.h"
#include "backend/cuda/steps/linear.h"
#include "backend/cuda/steps/pack.h"
#include "backend/cuda/steps/steps.h"
#include "backend/sm90/gather.h"
#include "backend/sm90/measure.h"
#include "backend/sm90/scratch.h"
#include "backend/sm90/steps.h"
#include "backend/sm90/tensor_map.h"

namespace nvfp4_moe {
namespace sm90 {
namespace {

constexpr DeviceMeasures kMeasures = {cuda::time_graph, cuda::read_rate, product_rate, "wgmma m64n128k16"};
constexpr LayerSteps kSteps = {route, cuda::quantize, gemm1_swiglu, cuda::requantize, gemm2, cuda::combine};
// The walk's, with the same results.
constexpr LayerSteps kWalk = {route, quantize_into_rows, gemm1_swiglu_in_walk, cuda::requantize, gemm2, cuda::combine};

Status supports(const MoeConfig& config, const DeviceFacts& device) {
  NVFP4_MOE_TRY(cuda::supports_device(device));
  if (device.compute_capability / 10 != 9)
    return unsupported("device: expected compute capability 9.x, whose wgmma no other GPU has, got " + device.name);
  return cuda::supports_config(config);
}

void take_scratch(const MoeConfig& config, const ExpertRange& range, int64_t tokens, Arena& arena) {
  Scratch(config, range, tokens, arena);
}
size_t workspace_bytes(const MoeConfig& config, const ExpertRange& range, const Plan& plan, int64_t tokens) {
  return cuda::workspace_bytes(take_scratch, config, range, plan, tokens);
}

Result<Plan> plan(const MoeConfig& config, const ExpertRange& range, const LayerScales& scales, const Limits& limits,
                  const DeviceFacts& device) {
  NVFP4_MOE_TRY(check_layer_limits(config, range, limits));
  const bool nvfp4 = config->activation_format == ActivationFormat::kNvfp4;
  const std::string gemm = std::string(kVariants[routed_variant(config, range, limits.max_tokens)].name) +
                           (nvfp4 ? "_w4a4_as_bf16" : "_w4a16");
  return cuda::make_plan("sm90", gemm, take_scratch, config, range, scales, limits, device);
}

// Of weights: the first thing that a process asks of a device, and where what run needs of the driver is looked for.
Result<Buffer> allocate(size_t size_bytes, int device) {
  NVFP4_MOE_TRY(find_tensor_map_encoder());
  return cuda::allocate(size_bytes, device);
}

Status run(const PackedWeights& weights, const Plan& plan, const Batch& batch, std::byte* workspace,
           const RunContext& context) {
  return cuda::run_layer(kWalk, tiling, weights, plan, batch, workspace, context);
}

constexpr cuda::LinearSteps kLinear = {gemm2, tiling, take_scratch};
size_t bytes_of_linear(const LinearWeights& weights, int64_t max_tokens) {
  return cuda::linear_workspace_bytes(kLinear, weights, max_tokens);
}
Status run_linear(const LinearWeights& weights, const LinearBatch& batch, std::byte* workspace,
                  const RunContext& context) {
  return cuda::linear_run(kLinear, weights, batch, workspace, context);
}

}  // namespace
}  // namespace sm90

constinit const Backend kSm90Backend = {
    .name = "sm90",
    .priority = 300,
    .supports = sm90::supports,
    .packed_bytes = cuda::packed_bytes,
    .allocate = sm90::allocate,
    .pack_expert = cuda::pack_expert,
    .unpack_expert = cuda::unpack_expert,
    .plan = sm90::plan,
    .run = sm90::run,
    .workspace_bytes = sm90::workspace_bytes,
    .linear_bytes = cuda::linear_bytes,
    .linear_pack = cuda::linear_pack,
    .linear_workspace_bytes = sm90::bytes_of_linear,
    .linear_run = sm90::run_linear,
    .steps = &sm90::kSteps,
    .memory = &cuda::kMemory,
    .measures = &sm90::kMeasures,
    .formats = &cuda::kFormats,
};

}  // namespace nvfp4_moe
