// The Backend table of the plain CUDA backend, "cuda": mma.sync on bf16 operands, for every GPU
// from sm_80 on. It runs if no specialized backend supports the architecture, and it is what the
// others are compared with.
#include "backend/backend.h"

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/measure.h"
#include "backend/cuda/layer.h"
#include "backend/cuda/pack/pack.h"
#include "backend/cuda/plain/architecture.h"
#include "backend/cuda/router/router.h"
#include "backend/cuda/steps/format.h"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal {
namespace sm80 {
namespace {

constexpr cuda::Architecture kArchitecture = cuda::plain::architecture("cuda");
using Functions = cuda::BackendFunctions<kArchitecture>;

constexpr DeviceMeasures kMeasures = {cuda::time_graph, cuda::read_rate, cuda::product_rate,
                                      "mma.sync m16n8k16"};
constexpr LayerSteps kSteps = {
    Functions::route,   Functions::quantize, cuda::plain::gemm1_swiglu, cuda::requantize,
    cuda::plain::gemm2, cuda::combine,       Functions::plan_steps,     kArchitecture.counters};

Status supports(const MoeConfig& config, const DeviceFacts& device) {
  NVFP4_MOE_TRY(cuda::supports_device(device));
  return cuda::supports_config(config);
}

}  // namespace
}  // namespace sm80

constinit const Backend kCudaBackend = {
    .name = "cuda",
    .priority = 200,
    .supports = sm80::supports,
    .packed_bytes = cuda::packed_bytes,
    .allocate = cuda::allocate,
    .pack_expert = cuda::pack_expert,
    .unpack_expert = cuda::unpack_expert,
    .plan = sm80::Functions::plan,
    .run = sm80::Functions::run,
    .workspace_bytes = sm80::Functions::workspace_bytes,
    .describe_run = sm80::Functions::describe_run,
    .gemm_tile_rows = sm80::Functions::gemm_tile_rows,
    .linear_bytes = cuda::linear_bytes,
    .linear_pack = cuda::linear_pack,
    .linear_workspace_bytes = sm80::Functions::linear_workspace_bytes,
    .linear_run = sm80::Functions::linear_run,
    .steps = &sm80::kSteps,
    .memory = &cuda::kMemory,
    .measures = &sm80::kMeasures,
    .formats = &cuda::kFormats,
    .router = &cuda::kRouter,
};

}  // namespace nvfp4_moe::internal
