// The functions of a backend that has its own GEMMs for one activation format. The other formats
// use other GEMMs, which may need another order of the same codes. A layer is opened for one
// activation format, and packed only for that one.
#pragma once

#include "backend/cuda/layer.h"
#include "backend/cuda/pack/pack.h"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal::cuda {

// kOwn and its tiles for activations of kFormat; kOther and its tiles for all other formats.
template <ActivationFormat kFormat, const Architecture& kOwn, const TileFormat& kOwnTiles,
          const Architecture& kOther, const TileFormat& kOtherTiles>
class BackendByFormat {
  using Own = BackendFunctions<kOwn>;
  using Other = BackendFunctions<kOther>;

  // The only code that distinguishes the formats: kOwnCall or kOtherCall with the same arguments,
  // selected by the argument that contains the format.
  static bool own(ActivationFormat format) { return format == kFormat; }
  static bool own(const MoeConfig& config) { return own(config->activation_format); }
  static bool own(const PackedWeights& weights) { return own(weights.config); }
  static bool own(const LinearWeights& weights) { return own(weights.activation_format); }
  static bool own(const StepContext& step) { return own(step.weights); }
  template <class Weights>
  static const TileFormat& tiles_of(const Weights& weights) {
    return own(weights) ? kOwnTiles : kOtherTiles;
  }

  template <auto kOwnCall, auto kOtherCall>
  struct ByFormat;
  template <class R, class First, class... Rest, R (*kOwnCall)(First, Rest...),
            R (*kOtherCall)(First, Rest...)>
  struct ByFormat<kOwnCall, kOtherCall> {
    static R call(First first, Rest... rest) {
      return (own(first) ? kOwnCall : kOtherCall)(first, rest...);
    }
  };
  template <auto kOwnCall, auto kOtherCall>
  static constexpr auto kByFormat = ByFormat<kOwnCall, kOtherCall>::call;

 public:
  static Status pack_expert(PackedWeights& weights, int64_t local_expert,
                            const ExpertSource& source) {
    return cuda::pack_expert(tiles_of(weights), weights, local_expert, source);
  }
  static Status unpack_expert(const PackedWeights& weights, int64_t local_expert,
                              const LentStaging& lent, ExpertBuffers& out) {
    return cuda::unpack_expert(tiles_of(weights), weights, local_expert, lent, out);
  }
  static Status linear_pack(LinearWeights& weights, const Nvfp4View& source) {
    return cuda::linear_pack(tiles_of(weights), weights, source);
  }
  static constexpr auto plan = kByFormat<Own::plan, Other::plan>;
  static constexpr auto run = kByFormat<Own::run, Other::run>;
  static constexpr auto workspace_bytes = kByFormat<Own::workspace_bytes, Other::workspace_bytes>;
  static constexpr auto describe_run = kByFormat<Own::describe_run, Other::describe_run>;
  static constexpr auto gemm_tile_rows = kByFormat<Own::gemm_tile_rows, Other::gemm_tile_rows>;
  static constexpr auto linear_workspace_bytes =
      kByFormat<Own::linear_workspace_bytes, Other::linear_workspace_bytes>;
  static constexpr auto linear_run = kByFormat<Own::linear_run, Other::linear_run>;
  static constexpr LayerSteps kSteps = {kByFormat<Own::route, Other::route>,
                                        kByFormat<Own::quantize, Other::quantize>,
                                        kByFormat<kOwn.gemm1_swiglu, kOther.gemm1_swiglu>,
                                        cuda::requantize,
                                        kByFormat<kOwn.gemm2, kOther.gemm2>,
                                        cuda::combine,
                                        kByFormat<Own::plan_steps, Other::plan_steps>,
                                        kByFormat<kOwn.counters, kOther.counters>};
};

}  // namespace nvfp4_moe::internal::cuda
