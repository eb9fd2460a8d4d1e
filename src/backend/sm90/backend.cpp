// Hopper's Backend table: the CUDA backend with GEMMs on wgmma, in E4M3 under fp8 and in bf16 under
// all other formats. Each has its own table of configurations and its own order of packed codes.
#include "backend/backend.h"

#include <array>
#include <span>

#include "backend/cuda/backend_by_format.h"
#include "backend/cuda/device/device.h"
#include "backend/cuda/device/measure.h"
#include "backend/cuda/layer.h"
#include "backend/cuda/router/router.h"
#include "backend/cuda/steps/format.h"
#include "backend/sm90/config.h"
#include "backend/sm90/config_table.h"
#include "backend/sm90/decode.h"
#include "backend/sm90/measure.h"
#include "backend/sm90/pack.h"
#include "backend/sm90/scratch.h"
#include "backend/sm90/steps.h"
#include "backend/sm90/tensor_map.h"

namespace nvfp4_moe::internal {
namespace sm90 {
namespace {

// kGemmConfigs in the form that a run's plan needs.
constexpr auto kConfigs = [] {
  std::array<cuda::GemmConfig, kGemmConfigs.size()> configs{};
  for (size_t i = 0; i < configs.size(); ++i) {
    const GemmConfig& gemm = kGemmConfigs[i];
    configs[i] = {gemm.name,
                  gemm.tile_n,
                  true,
                  gemm.tma_rows,
                  gemm.fused_routing(),
                  gemm.partial_bytes(),
                  gemm.wide,
                  gemm.fused_requantize()};
  }
  return configs;
}();
constexpr std::span<const cuda::GemmConfig> kAllConfigs = kConfigs;

template <const ConfigTable& kTable>
int routed(const MoeConfig& config, const ExpertRange& range, int64_t tokens) {
  return routed_config(kTable, config, range, tokens);
}
template <const ConfigTable& kTable>
int shared(int64_t tokens) {
  return shared_config(kTable, tokens);
}

constexpr cuda::Architecture kBf16 = {
    .gemms = {"sm90",
              kAllConfigs.first<kBf16Configs>(),
              routed<kBf16Table>,
              shared<kBf16Table>,
              splits_k,
              kMaxCtas,
              {},
              plan_decode},
    .gemm_kind = "wgmma",
    .quantize_into_rows = quantize_into_rows,
    .gemm1_swiglu = gemm1_swiglu,
    .gemm2 = gemm2,
    .take_scratch = Scratch::take,
    .counters = Scratch::counters,
    .run_in_one_launch = decode,
};
constexpr cuda::Architecture kFp8 = [] {
  cuda::Architecture fp8 = kBf16;
  fp8.gemms.configs = kAllConfigs.subspan<kBf16Configs>();
  fp8.gemms.routed = routed<kFp8Table>;
  fp8.gemms.shared = shared<kFp8Table>;
  fp8.gemms.operands.fp8 = cuda::Operand::kE4m3;
  fp8.run_in_one_launch = decode_fp8;
  return fp8;
}();
using Functions =
    cuda::BackendByFormat<ActivationFormat::kFp8, kFp8, kFp8Tiles, kBf16, cuda::kBf16Tiles>;

constexpr DeviceMeasures kMeasures = {cuda::time_graph, cuda::read_rate, product_rate,
                                      "wgmma m64n128k16"};

Status supports(const MoeConfig& config, const DeviceFacts& device) {
  NVFP4_MOE_TRY(cuda::supports_device(device));
  if (device.compute_capability / 10 != 9)
    return unsupported(
        "device: expected compute capability 9.x, whose wgmma no other GPU has, got " +
        device.name);
  return cuda::supports_config(config);
}

// Allocates weights. This is a process's first call to a device, so it also looks up the driver
// functions that run needs.
Result<Buffer> allocate(size_t size_bytes, int device, const char* purpose) {
  NVFP4_MOE_TRY(find_tensor_map_encoder());
  return cuda::allocate(size_bytes, device, purpose);
}

}  // namespace
}  // namespace sm90

constinit const Backend kSm90Backend = {
    .name = "sm90",
    .priority = 300,
    .supports = sm90::supports,
    .packed_bytes = cuda::packed_bytes,
    .allocate = sm90::allocate,
    .pack_expert = sm90::Functions::pack_expert,
    .unpack_expert = sm90::Functions::unpack_expert,
    .plan = sm90::Functions::plan,
    .run = sm90::Functions::run,
    .workspace_bytes = sm90::Functions::workspace_bytes,
    .describe_run = sm90::Functions::describe_run,
    .gemm_tile_rows = sm90::Functions::gemm_tile_rows,
    .linear_bytes = cuda::linear_bytes,
    .linear_pack = sm90::Functions::linear_pack,
    .linear_workspace_bytes = sm90::Functions::linear_workspace_bytes,
    .linear_run = sm90::Functions::linear_run,
    .steps = &sm90::Functions::kSteps,
    .memory = &cuda::kMemory,
    .self_check = SelfCheck::kOnRequest,
    .fp8_caveat =
        "fp8: Hopper's FP8 tensor cores accumulate with 13 bits and cut off the rest, so that "
        "results whose products "
        "agree "
        "in sign come out too small (docs/explanation/numerics.md, section 7); backend \"cuda\" "
        "adds the same "
        "products in fp32",
    .measures = &sm90::kMeasures,
    .formats = &cuda::kFormats,
    .router = &cuda::kRouter,
};

}  // namespace nvfp4_moe::internal
