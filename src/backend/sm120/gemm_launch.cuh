// What both GEMMs take from a step: the part's sides, and the kernel of its configuration by the run's plan.
#pragma once

#include <array>
#include <utility>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/packed_layout.h"
#include "backend/cuda/steps/steps.h"
#include "backend/sm120/config.h"
#include "backend/sm120/gemm.cuh"
#include "backend/sm120/scratch.h"

namespace nvfp4_moe::sm120 {

// A part of a layer as a grouped GEMM sees it.
struct GemmPart {
  bool shared;
  cuda::PartLayout layout;

  GemmPart(const StepContext& step, const PartBuffers& part) : shared(&part == &step.buffers.shared) {
    const cuda::PackedLayout packed(step.weights.config, step.weights.range);
    layout = shared ? packed.shared : packed.routed;
  }
  const uint8_t* weights(const StepContext& step, int64_t offset) const {
    return reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) + layout.offset + offset;
  }
};

// All but weights and assignment_of_row. x: rows of k elements.
inline GemmArgs gemm_args(const StepContext& step, const PartBuffers& part, const GemmPart& of,
                          const cuda::GemmPlan& plan, const cuda::MatrixTiles& tiles, const std::byte* x, int64_t k) {
  const GemmConfig& gemm = kGemmConfigs[static_cast<size_t>(plan.config)];
  const Scratch scratch(step);
  GemmArgs args{};
  args.expert_stride = of.layout.expert_stride;
  args.k_tiles = static_cast<int32_t>(tiles.k_tiles);
  args.x = x;
  args.x_stride = cuda::fp4_row_bytes(k);
  args.schedule = cuda::ScheduleParams(static_cast<int32_t>(tiles.row_tiles),
                                       static_cast<int32_t>(cuda::ceil_div(tiles.k_tiles, kBlockTiles)), plan.ctas,
                                       plan.split_k, min_saved_k_blocks(gemm), max_splits(gemm));
  args.by_top_k = cuda::Divider(static_cast<int32_t>(step.weights.config->top_k));
  args.row_tiles = {of.shared ? nullptr : scratch.common.tiles, scratch.common.tile_count, part.row_offsets};
  args.partials = scratch.partials;
  args.arrivals = scratch.arrivals;
  args.after_route = plan.after_route;
  return args;
}

// One launcher for each of kGemmConfigs, of the kernels that kKernels<index> names.
template <class Epilogue>
using Launcher = Status (*)(const cuda::GemmPlan& plan, void* stream, const GemmArgs& args, const Epilogue& epilogue);

template <class Kernels, class Epilogue, size_t... kIndices>
constexpr std::array<Launcher<Epilogue>, sizeof...(kIndices)> make_launchers(std::index_sequence<kIndices...>) {
  return {[](const cuda::GemmPlan& plan, void* stream, const GemmArgs& args, const Epilogue& epilogue) {
    using Traits = GemmTraits<kIndices>;
    return cuda::launch<Kernels::template kKernel<kIndices>>(Kernels::kName, static_cast<unsigned>(plan.ctas),
                                                             Traits::kThreads, sizeof(Shared<Traits>), stream, args,
                                                             epilogue);
  }...};
}

// Kernels: a struct of kName and kKernel<index>.
template <class Kernels, class Epilogue>
Status launch_gemm(const cuda::GemmPlan& plan, void* stream, const GemmArgs& args, const Epilogue& epilogue) {
  static constexpr auto kLaunchers = make_launchers<Kernels, Epilogue>(std::make_index_sequence<kGemmConfigs.size()>());
  return kLaunchers[static_cast<size_t>(plan.config)](plan, stream, args, epilogue);
}

}  // namespace nvfp4_moe::sm120
