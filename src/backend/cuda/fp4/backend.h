// The functions of a backend with FP4 tensor cores. They multiply nvfp4 activations; others go through other GEMMs, which may want another order of the same codes: a layer is opened for one format of activations, and packed for
// that one alone.
#pragma once

#include "backend/cuda/layer.h"
#include "backend/cuda/steps/pack.h"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::cuda::fp4 {

// kFp4 and its tiles under nvfp4 activations, kBf16 and its tiles under the others.
template <const Architecture& kFp4, const TileFormat& kFp4Tiles, const Architecture& kBf16,
          const TileFormat& kBf16Tiles>
class BackendByFormat {
  using Fp4 = BackendFunctions<kFp4>;
  using Bf16 = BackendFunctions<kBf16>;

  // The one place that tells the formats apart: kFp4Call or kBf16Call with the same arguments, by what carries the format.
  static bool fp4(ActivationFormat format) { return format == ActivationFormat::kNvfp4; }
  static bool fp4(const MoeConfig& config) { return fp4(config->activation_format); }
  static bool fp4(const PackedWeights& weights) { return fp4(weights.config); }
  static bool fp4(const LinearWeights& weights) { return fp4(weights.activation_format); }
  static bool fp4(const StepContext& step) { return fp4(step.weights); }
  template <class Weights>
  static const TileFormat& tiles_of(const Weights& weights) {
    return fp4(weights) ? kFp4Tiles : kBf16Tiles;
  }

  template <auto kFp4Call, auto kBf16Call>
  struct ByFormat;
  template <class R, class First, class... Rest, R (*kFp4Call)(First, Rest...), R (*kBf16Call)(First, Rest...)>
  struct ByFormat<kFp4Call, kBf16Call> {
    static R call(First first, Rest... rest) { return (fp4(first) ? kFp4Call : kBf16Call)(first, rest...); }
  };
  template <auto kFp4Call, auto kBf16Call>
  static constexpr auto kByFormat = ByFormat<kFp4Call, kBf16Call>::call;

 public:
  static Status pack_expert(PackedWeights& weights, int64_t local_expert, const ExpertSource& source) {
    return cuda::pack_expert(tiles_of(weights), weights, local_expert, source);
  }
  static Status unpack_expert(const PackedWeights& weights, int64_t local_expert, ExpertBuffers& out) {
    return cuda::unpack_expert(tiles_of(weights), weights, local_expert, out);
  }
  static Status linear_pack(LinearWeights& weights, const Nvfp4View& source) {
    return cuda::linear_pack(tiles_of(weights), weights, source);
  }
  static constexpr auto plan = kByFormat<Fp4::plan, Bf16::plan>;
  static constexpr auto run = kByFormat<Fp4::run, Bf16::run>;
  static constexpr auto workspace_bytes = kByFormat<Fp4::workspace_bytes, Bf16::workspace_bytes>;
  static constexpr auto describe_run = kByFormat<Fp4::describe_run, Bf16::describe_run>;
  static constexpr auto linear_workspace_bytes = kByFormat<Fp4::linear_workspace_bytes, Bf16::linear_workspace_bytes>;
  static constexpr auto linear_run = kByFormat<Fp4::linear_run, Bf16::linear_run>;
  static constexpr LayerSteps kSteps = {kByFormat<Fp4::route, Bf16::route>,
                                        kByFormat<Fp4::quantize, Bf16::quantize>,
                                        kByFormat<kFp4.gemm1_swiglu, kBf16.gemm1_swiglu>,
                                        cuda::requantize,
                                        kByFormat<kFp4.gemm2, kBf16.gemm2>,
                                        cuda::combine,
                                        kByFormat<Fp4::plan_steps, Bf16::plan_steps>};
};

}  // namespace nvfp4_moe::cuda::fp4
