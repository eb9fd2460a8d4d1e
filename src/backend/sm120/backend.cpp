// The entry of RTX Blackwell in the contract: the CUDA backend with GEMMs on block-scaled FP4 tensor cores.
//
// They multiply nvfp4 activations. bf16 activations go through the plain GEMMs, which want another order of the same codes
// (packed_tile.h): a layer is opened for one format of activations and packed for that one alone.
#include "backend/backend.h"

#include <array>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/measure.h"
#include "backend/cuda/layer.h"
#include "backend/cuda/plain/architecture.h"
#include "backend/cuda/steps/format.h"
#include "backend/cuda/steps/pack.h"
#include "backend/cuda/steps/select_experts.h"
#include "backend/cuda/steps/steps.h"
#include "backend/sm120/config.h"
#include "backend/sm120/pack.h"
#include "backend/sm120/scratch.h"
#include "backend/sm120/steps.h"

namespace nvfp4_moe {
namespace sm120 {
namespace {

// What the plan of a run has to know of kGemmConfigs.
constexpr auto kConfigs = [] {
  std::array<cuda::GemmConfig, kGemmConfigs.size()> configs{};
  for (size_t i = 0; i < configs.size(); ++i) {
    const GemmConfig& gemm = kGemmConfigs[i];
    configs[i] = {gemm.name, gemm.tile_n, true, false, false, gemm.partial_bytes()};
  }
  return configs;
}();

void take_scratch(const MoeConfig& config, const ExpertRange& range, const RunPlan& plan, Arena& arena) {
  Scratch(config, range, plan, arena);
}
int32_t* counters(const StepContext& step) { return Scratch(step).arrivals; }

constexpr cuda::Architecture kFp4 = {
    .gemms = {"sm120", kConfigs, routed_config, shared_config, splits_k, kMaxCtas, true},
    .gemm_kind = "mma_m16n8k64",
    .quantize_into_rows = nullptr,
    .gemm1_swiglu = gemm1_swiglu,
    .gemm2 = gemm2,
    .take_scratch = take_scratch,
    .counters = counters,
};
constexpr cuda::Architecture kBf16 = cuda::plain::architecture("sm120");
using Fp4 = cuda::BackendFunctions<kFp4>;
using Bf16 = cuda::BackendFunctions<kBf16>;

// The one place that tells the formats apart: kFp4Call or kBf16Call with the same arguments, by what carries the format.
bool fp4(ActivationFormat format) { return format == ActivationFormat::kNvfp4; }
bool fp4(const MoeConfig& config) { return fp4(config->activation_format); }
bool fp4(const PackedWeights& weights) { return fp4(weights.config); }
bool fp4(const LinearWeights& weights) { return fp4(weights.activation_format); }
bool fp4(const StepContext& step) { return fp4(step.weights); }

template <auto kFp4Call, auto kBf16Call>
struct ByFormat;
template <class R, class First, class... Rest, R (*kFp4Call)(First, Rest...), R (*kBf16Call)(First, Rest...)>
struct ByFormat<kFp4Call, kBf16Call> {
  static R call(First first, Rest... rest) { return (fp4(first) ? kFp4Call : kBf16Call)(first, rest...); }
};
template <auto kFp4Call, auto kBf16Call>
constexpr auto kByFormat = ByFormat<kFp4Call, kBf16Call>::call;

const cuda::TileFormat& tiles_of(bool fp4) { return fp4 ? kFp4Tiles : cuda::kBf16Tiles; }
Status pack_expert(PackedWeights& weights, int64_t local_expert, const ExpertSource& source) {
  return cuda::pack_expert(tiles_of(fp4(weights)), weights, local_expert, source);
}
Status unpack_expert(const PackedWeights& weights, int64_t local_expert, ExpertBuffers& out) {
  return cuda::unpack_expert(tiles_of(fp4(weights)), weights, local_expert, out);
}
Status linear_pack(LinearWeights& weights, const Nvfp4View& source) {
  return cuda::linear_pack(tiles_of(fp4(weights)), weights, source);
}

constexpr DeviceMeasures kMeasures = {cuda::time_graph, cuda::read_rate, cuda::product_rate, "mma.sync m16n8k16"};
constexpr LayerSteps kSteps = {kByFormat<Fp4::route, Bf16::route>,
                               kByFormat<Fp4::quantize, Bf16::quantize>,
                               kByFormat<gemm1_swiglu, cuda::plain::gemm1_swiglu>,
                               cuda::requantize,
                               kByFormat<gemm2, cuda::plain::gemm2>,
                               cuda::combine,
                               kByFormat<Fp4::plan_steps, Bf16::plan_steps>};

Status supports(const MoeConfig& config, const DeviceFacts& device) {
  NVFP4_MOE_TRY(cuda::supports_device(device));
  if (device.compute_capability / 10 != 12)
    return unsupported("device: expected compute capability 12.x, whose block-scaled mma.sync no other GPU has, got " +
                       device.name);
#ifndef NVFP4_MOE_SM120_FAMILY
  if (device.compute_capability != 120)
    return unsupported("device: expected compute capability 12.0, got 12." +
                       std::to_string(device.compute_capability % 10) + " (" + device.name +
                       "): this build's compiler is older than CUDA 12.9");
#endif
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
    .pack_expert = sm120::pack_expert,
    .unpack_expert = sm120::unpack_expert,
    .plan = sm120::kByFormat<sm120::Fp4::plan, sm120::Bf16::plan>,
    .run = sm120::kByFormat<sm120::Fp4::run, sm120::Bf16::run>,
    .workspace_bytes = sm120::kByFormat<sm120::Fp4::workspace_bytes, sm120::Bf16::workspace_bytes>,
    .describe_run = sm120::kByFormat<sm120::Fp4::describe_run, sm120::Bf16::describe_run>,
    .linear_bytes = cuda::linear_bytes,
    .linear_pack = sm120::linear_pack,
    .linear_workspace_bytes = sm120::kByFormat<sm120::Fp4::linear_workspace_bytes, sm120::Bf16::linear_workspace_bytes>,
    .linear_run = sm120::kByFormat<sm120::Fp4::linear_run, sm120::Bf16::linear_run>,
    .steps = &sm120::kSteps,
    .memory = &cuda::kMemory,
    .caveat = "executed on an emulator of PTX, never yet on a GPU of this kind (docs/blackwell.md)",
    .measures = &sm120::kMeasures,
    .formats = &cuda::kFormats,
    .router = &cuda::kRouter,
};

}  // namespace nvfp4_moe
