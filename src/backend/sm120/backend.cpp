// The Backend table of RTX Blackwell: the CUDA backend with GEMMs on block-scaled FP4 tensor cores.
// bf16 activations use the plain GEMMs.
#include "backend/backend.h"

#include <array>

#include "backend/cuda/backend_by_format.h"
#include "backend/cuda/device/device.h"
#include "backend/cuda/device/measure.h"
#include "backend/cuda/plain/architecture.h"
#include "backend/cuda/router/router.h"
#include "backend/cuda/steps/format.h"
#include "backend/sm120/config.h"
#include "backend/sm120/pack.h"
#include "backend/sm120/steps.h"

namespace nvfp4_moe::internal {
namespace sm120 {
namespace {

// kGemmConfigs in the form that a run's plan needs.
constexpr auto kConfigs = [] {
  std::array<cuda::GemmConfig, kGemmConfigs.size()> configs{};
  for (size_t i = 0; i < configs.size(); ++i) {
    const GemmConfig& gemm = kGemmConfigs[i];
    configs[i] = {gemm.name, gemm.tile_n, true, false, false, gemm.partial_bytes()};
  }
  return configs;
}();

constexpr cuda::Architecture kFp4 = {
    .gemms = {"sm120",
              kConfigs,
              routed_config,
              shared_config,
              splits_k,
              kMaxCtas,
              {.nvfp4 = cuda::Operand::kFp4}},
    .gemm_kind = "mma_m16n8k64",
    .quantize_into_rows = nullptr,
    .gemm1_swiglu = gemm1_swiglu,
    .gemm2 = gemm2,
    .take_scratch = Scratch::take,
    .counters = Scratch::counters,
};
constexpr cuda::Architecture kBf16 = cuda::plain::architecture("sm120");
using Functions =
    cuda::BackendByFormat<ActivationFormat::kNvfp4, kFp4, kFp4Tiles, kBf16, cuda::kBf16Tiles>;

constexpr DeviceMeasures kMeasures = {cuda::time_graph, cuda::read_rate, cuda::product_rate,
                                      "mma.sync m16n8k16"};

Status supports(const MoeConfig& config, const DeviceFacts& device) {
  NVFP4_MOE_TRY(cuda::supports_device(device));
  if (device.compute_capability / 10 != 12)
    return unsupported(
        "device: expected compute capability 12.x, whose block-scaled mma.sync no other GPU has, "
        "got " +
        device.name);
  return cuda::supports_config(config);
}

}  // namespace
}  // namespace sm120

constinit const Backend kSm120Backend = {
    .name = "sm120",
    .priority = 310,
    .supports = sm120::supports,
    .packed_bytes = cuda::packed_bytes,
    .allocate = cuda::allocate,
    .pack_expert = sm120::Functions::pack_expert,
    .unpack_expert = sm120::Functions::unpack_expert,
    .plan = sm120::Functions::plan,
    .run = sm120::Functions::run,
    .workspace_bytes = sm120::Functions::workspace_bytes,
    .describe_run = sm120::Functions::describe_run,
    .gemm_tile_rows = sm120::Functions::gemm_tile_rows,
    .linear_bytes = cuda::linear_bytes,
    .linear_pack = sm120::Functions::linear_pack,
    .linear_workspace_bytes = sm120::Functions::linear_workspace_bytes,
    .linear_run = sm120::Functions::linear_run,
    .steps = &sm120::Functions::kSteps,
    .memory = &cuda::kMemory,
    .self_check = SelfCheck::kBeforeUse,
    .caveat =
        "never run on a chip of this kind, on an emulator of PTX only "
        "(docs/explanation/blackwell.md); backend "
        "\"cuda\" has run on "
        "GPUs",
    .measures = &sm120::kMeasures,
    .formats = &cuda::kFormats,
    .router = &cuda::kRouter,
};

}  // namespace nvfp4_moe::internal
