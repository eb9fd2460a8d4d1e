// The Backend table of B200 and B300: the CUDA backend with GEMMs on tcgen05. Weights are packed
// the same way for both formats of activations.
#include "backend/backend.h"

#include <array>

#include "backend/cuda/backend_by_format.h"
#include "backend/cuda/device/device.h"
#include "backend/cuda/device/measure.h"
#include "backend/cuda/router/router.h"
#include "backend/cuda/steps/format.h"
#include "backend/sm100/config.h"
#include "backend/sm100/pack.h"
#include "backend/sm100/steps.h"

namespace nvfp4_moe::internal {
namespace sm100 {
namespace {

// A table of configurations in the form that a run's plan needs.
template <const auto& kGemms>
constexpr auto kConfigs = [] {
  std::array<cuda::GemmConfig, kGemms.size()> configs{};
  for (size_t i = 0; i < configs.size(); ++i) {
    const GemmConfig& gemm = kGemms[i];
    configs[i] = {gemm.name, gemm.tile_n, true, false, false, gemm.partial_bytes()};
  }
  return configs;
}();

constexpr cuda::Architecture kFp4 = {
    .gemms = {"sm100",
              kConfigs<kGemmConfigs>,
              routed_config,
              shared_config,
              splits_k,
              kMaxCtas,
              {.nvfp4 = cuda::Operand::kFp4}},
    .gemm_kind = "tcgen05_m128k64",
    .quantize_into_rows = nullptr,
    .gemm1_swiglu = gemm1_swiglu,
    .gemm2 = gemm2,
    .take_scratch = Scratch::take,
    .counters = Scratch::counters,
};
constexpr cuda::Architecture kBf16 = {
    .gemms = {"sm100", kConfigs<kBf16GemmConfigs>, routed_config_of<kBf16GemmConfigs>,
              shared_config_of<kBf16GemmConfigs>, splits_k, kMaxCtas},
    .gemm_kind = "tcgen05_m128k16",
    .quantize_into_rows = nullptr,
    .gemm1_swiglu = bf16_gemm1_swiglu,
    .gemm2 = bf16_gemm2,
    .take_scratch = Scratch::take,
    .counters = Scratch::counters,
};
using Functions =
    cuda::BackendByFormat<ActivationFormat::kNvfp4, kFp4, kFp4Tiles, kBf16, kFp4Tiles>;

constexpr DeviceMeasures kMeasures = {cuda::time_graph, cuda::read_rate, cuda::product_rate,
                                      "mma.sync m16n8k16"};

Status supports(const MoeConfig& config, const DeviceFacts& device) {
  NVFP4_MOE_TRY(cuda::supports_device(device));
  const int generation = device.compute_capability / 10;
  if (generation != 10 && !(generation == 11 && cuda::has_code_for_thor()))
    return unsupported(
        "device: expected compute capability 10.x, or 11.0 in a build for 110, whose tcgen05 no "
        "other GPU has, got " +
        device.name);
  NVFP4_MOE_TRY(cuda::decline_fp8(config));
  return cuda::supports_config(config);
}

}  // namespace
}  // namespace sm100

constinit const Backend kSm100Backend = {
    .name = "sm100",
    .priority = 320,
    .supports = sm100::supports,
    .packed_bytes = cuda::packed_bytes,
    .allocate = cuda::allocate,
    .pack_expert = sm100::Functions::pack_expert,
    .unpack_expert = sm100::Functions::unpack_expert,
    .plan = sm100::Functions::plan,
    .run = sm100::Functions::run,
    .workspace_bytes = sm100::Functions::workspace_bytes,
    .describe_run = sm100::Functions::describe_run,
    .gemm_tile_rows = sm100::Functions::gemm_tile_rows,
    .linear_bytes = cuda::linear_bytes,
    .linear_pack = sm100::Functions::linear_pack,
    .linear_workspace_bytes = sm100::Functions::linear_workspace_bytes,
    .linear_run = sm100::Functions::linear_run,
    .steps = &sm100::Functions::kSteps,
    .memory = &cuda::kMemory,
    .self_check = SelfCheck::kBeforeUse,
    .caveat =
        "never run on a chip of this kind, on an emulator of PTX only "
        "(docs/explanation/blackwell.md); backend "
        "\"cuda\" has run on "
        "GPUs",
    .measures = &sm100::kMeasures,
    .formats = &cuda::kFormats,
    .router = &cuda::kRouter,
};

}  // namespace nvfp4_moe::internal
