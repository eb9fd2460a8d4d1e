// gemm1_swiglu and gemm2 on FP4 tensor cores as steps: derive the arguments from a layer, and
// launch the kernel of the configuration in the run's plan.
//
//   gemm1_swiglu   hidden (T, H) as FP4 operand, joined gate/up tiles (or up tiles) ->
//                  part.intermediate.bf16 (R, I)
//   gemm2          part.intermediate (R, I) as FP4 operand, down tiles -> part.rows_out (R, H) in
//                  row_format
//
// GEMMs on bf16 rows, for bf16 activations, share everything except the operand and the length of a
// k-block.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/fp4/epilogue.cuh"
#include "backend/cuda/packed_layout.h"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal::cuda::fp4 {

// A backend's GEMMs on rows in FP4 or bf16. kConfigs: their configurations; its namespace also has
// min_saved_k_blocks and max_splits of a configuration, in k-blocks of kFp4KBlock. TraitsOf<index>:
// its constants, including a cta's kThreads. SharedOf<Traits>: a cta's shared memory.
template <bool kFp4Rows, class ScratchOf, const auto& kConfigs, template <size_t> class TraitsOf,
          template <class> class SharedOf>
struct GemmRoom {
  using Scratch = ScratchOf;
  static constexpr bool kFp4 = kFp4Rows;
  // k per k-block, which is one stage of the pipeline
  static constexpr int kBlockK = kFp4 ? kFp4KBlock : kTileK;
  static constexpr const auto& kGemmConfigs = kConfigs;
  template <size_t kIndex>
  static constexpr int kThreads = TraitsOf<kIndex>::kThreads;
  template <size_t kIndex>
  static constexpr int64_t kSharedBytes = sizeof(SharedOf<TraitsOf<kIndex>>);

  // The same bytes of weights, in k-blocks half as long if rows are bf16.
  template <class Config>
  static constexpr int32_t min_saved(const Config& config) {
    return min_saved_k_blocks(config) * (kFp4KBlock / kBlockK);
  }
};

// A part of a layer as a grouped GEMM.
struct GemmPart {
  bool shared;
  PartLayout layout;

  GemmPart(const StepContext& step, const PartBuffers& part)
      : shared(&part == &step.buffers.shared) {
    const PackedLayout packed(step.weights.config, step.weights.range);
    layout = shared ? packed.shared : packed.routed;
  }
  const uint8_t* weights(const StepContext& step, int64_t offset) const {
    return reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) + layout.offset + offset;
  }
};

// All arguments except weights and assignment_of_row. x: rows of k elements.
template <class Room>
GemmArgs gemm_args(const StepContext& step, const PartBuffers& part, const GemmPart& of,
                   const GemmPlan& plan, const MatrixTiles& tiles, const std::byte* x, int64_t k) {
  const auto& gemm = Room::kGemmConfigs[static_cast<size_t>(plan.config)];
  const typename Room::Scratch scratch(step);
  GemmArgs args{};
  args.expert_stride = of.layout.expert_stride;
  args.k_tiles = static_cast<int32_t>(tiles.k_tiles);
  args.x = x;
  args.x_stride = operand_row_bytes(step.plan->operand, k);
  args.schedule =
      ScheduleParams(static_cast<int32_t>(tiles.row_tiles),
                     static_cast<int32_t>(ceil_div(tiles.k_tiles, Room::kBlockK / kTileK)),
                     plan.ctas, plan.split_k, Room::min_saved(gemm), max_splits(gemm));
  args.by_top_k = Divider(static_cast<int32_t>(step.weights.config->top_k));
  args.row_tiles = {of.shared ? nullptr : scratch.common.tiles, scratch.common.tile_count,
                    part.row_offsets};
  args.partials = scratch.partials;
  args.arrivals = scratch.arrivals;
  args.after_route = plan.after_route;
  return args;
}

// One launcher for each configuration, for the kernels that kKernels<index> names.
template <class Epilogue>
using Launcher = Status (*)(const GemmPlan& plan, void* stream, const GemmArgs& args,
                            const Epilogue& epilogue);

template <class Room, class Kernels, class Epilogue, size_t... kIndices>
constexpr std::array<Launcher<Epilogue>, sizeof...(kIndices)> make_launchers(
    std::index_sequence<kIndices...>) {
  return {[](const GemmPlan& plan, void* stream, const GemmArgs& args, const Epilogue& epilogue) {
    return launch<Kernels::template kKernel<kIndices>>(
        Kernels::kName, static_cast<unsigned>(plan.ctas), Room::template kThreads<kIndices>,
        Room::template kSharedBytes<kIndices>, stream, args, epilogue);
  }...};
}

// Kernels: a struct with kName and kKernel<index>.
template <class Room, class Kernels, class Epilogue>
Status launch_gemm(const GemmPlan& plan, void* stream, const GemmArgs& args,
                   const Epilogue& epilogue) {
  static constexpr auto kLaunchers = make_launchers<Room, Kernels, Epilogue>(
      std::make_index_sequence<Room::kGemmConfigs.size()>());
  return kLaunchers[static_cast<size_t>(plan.config)](plan, stream, args, epilogue);
}

// Kernels: a template over the epilogue.
template <class Room, template <class> class Kernels>
Status gemm1_swiglu(const StepContext& step, const PartBuffers& part) {
  if (step.batch.tokens == 0) return {};
  const MoeConfig& config = step.weights.config;
  const GemmPlan& plan = plan_of(step, part).gemm1;
  const GemmPart of(step, part);
  GemmArgs args = gemm_args<Room>(step, part, of, plan, of.layout.gate_up, hidden_rows(step, part),
                                  config->hidden_size);
  args.weights = of.weights(step, 0);
  args.assignment_of_row = part.assignment_of_row;
  using Gated = std::conditional_t<Room::kFp4, SwigluEpilogue, Bf16SwigluEpilogue>;
  using OfGeluOrSitu = GeluOrSituEpilogue<Gated>;
  using Relu2 = Relu2Epilogue<Gated>;
  Gated epilogue{};
  if constexpr (!Room::kFp4) epilogue.nonfinite = part.hidden.nonfinite;
  epilogue.tensor_scales = tensor_scales(step.weights, of.shared);
  epilogue.row_scale = part.hidden.row_scale;
  epilogue.router_weights = config->router_weight == RouterWeight::kBeforeDown && !of.shared
                                ? step.batch.topk_weights
                                : nullptr;
  epilogue.bias_table = gemm1_biases(step.weights, of.shared);
  epilogue.activation = GatedActivation::from(config);  // read only by the functions of swiglu
  epilogue.out = part.intermediate.bf16;
  epilogue.channels = part.intermediate_size;
  switch (gemm1_function(config->activation)) {
    case Gemm1Function::kSwiglu: break;
    case Gemm1Function::kGeluOrSitu:
      return launch_gemm<Room, Kernels<OfGeluOrSitu>>(
          plan, step.stream, args, OfGeluOrSitu{epilogue, GeluOrSitu::from(config)});
    case Gemm1Function::kRelu2:
      return launch_gemm<Room, Kernels<Relu2>>(plan, step.stream, args, Relu2{epilogue});
  }
  return launch_gemm<Room, Kernels<Gated>>(plan, step.stream, args, epilogue);
}

template <class Room, class Kernels>
Status gemm2(const StepContext& step, const PartBuffers& part) {
  if (step.batch.tokens == 0) return {};
  const MoeConfig& config = step.weights.config;
  const GemmPlan& plan = plan_of(step, part).gemm2;
  const GemmPart of(step, part);
  GemmArgs args = gemm_args<Room>(step, part, of, plan, of.layout.down,
                                  intermediate_rows(step, part), part.intermediate_size);
  args.weights = of.weights(step, part.down_only ? 0 : of.layout.gate_up.bytes());
  DownEpilogue epilogue{};
  epilogue.tensor_scales = tensor_scales(step.weights, of.shared);
  epilogue.row_scale = part.intermediate.row_scale;
  epilogue.bias_table = down_biases(step.weights, of.shared);
  epilogue.out = part.rows_out;
  epilogue.out_fp32 = config->row_format == RowFormat::kFp32;
  epilogue.channels = config->hidden_size;
  return launch_gemm<Room, Kernels>(plan, step.stream, args, epilogue);
}

}  // namespace nvfp4_moe::internal::cuda::fp4
