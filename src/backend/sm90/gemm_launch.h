// Derives the arguments of both GEMMs from a step: the part's sizes, and its configuration in the
// run's plan.
#pragma once

#include "backend/cuda/packed_layout.h"
#include "backend/cuda/steps/steps.h"
#include "backend/sm90/config.h"
#include "backend/sm90/gemm_params.cuh"
#include "backend/sm90/kernels.h"
#include "backend/sm90/scratch.h"
#include "backend/sm90/tensor_map.h"

namespace nvfp4_moe::internal::sm90 {

// A part of a layer as a grouped GEMM.
struct GemmPart {
  bool shared;
  cuda::PartLayout layout;
  int64_t rows;  // upper bound

  GemmPart(const StepContext& step, const PartBuffers& part)
      : shared(&part == &step.buffers.shared) {
    const cuda::PackedLayout packed(step.weights.config, step.weights.range);
    layout = shared ? packed.shared : packed.routed;
    rows = step.batch.tokens * (shared ? 1 : step.weights.config->top_k);
  }
};

// The index in kGemmConfigs of an index into the run's table.
inline size_t config_index(const StepContext& step, int config) {
  return static_cast<size_t>(config) +
         (step.plan->operand == cuda::Operand::kE4m3 ? kBf16Configs : 0);
}

// All arguments except weights and assignment_of_row. config: the plan's own, or its wide one.
inline GemmArgs gemm_args(const StepContext& step, const PartBuffers& part, const GemmPart& of,
                          const cuda::GemmPlan& plan, int config, const cuda::MatrixTiles& tiles,
                          const Scratch& scratch) {
  const GemmConfig& gemm = kGemmConfigs[config_index(step, config)];
  GemmArgs args{};
  args.expert_stride = of.layout.expert_stride;
  args.m_blocks = static_cast<int32_t>(tiles.row_tiles);
  args.k_blocks = static_cast<int32_t>(tiles.k_tiles);
  args.schedule = ScheduleParams(
      static_cast<int32_t>(cuda::ceil_div(tiles.row_tiles, gemm.tile_m / cuda::kTileRows)),
      args.k_blocks, plan.ctas, plan.split_k, static_cast<int32_t>(min_saved_k_blocks(gemm)),
      max_splits(gemm));
  args.by_top_k = Divider(static_cast<int32_t>(step.weights.config->top_k));
  args.row_offsets = part.row_offsets;
  args.row_tiles = of.shared ? nullptr : scratch.common.tiles;
  args.row_tile_count = scratch.common.tile_count;
  args.lists_wide = scratch.common.lists_wide;
  args.partials = scratch.partials;
  args.arrivals = scratch.arrivals;
  args.waits_for_requantize = plan.waits_for_quantize;
  args.after_route = plan.after_route;
  return args;
}

inline const KernelEntry& kernels_of(const StepContext& step, const cuda::GemmPlan& plan) {
  const size_t index = config_index(step, plan.config);
  const GemmConfig& gemm = kGemmConfigs[index];
  return kernel_entry(plan.wide >= 0 ? index : config_of(gemm.tile_m, gemm.tile_n, gemm.fp8));
}
inline LaunchSite launch_site(const StepContext& step, const cuda::GemmPlan& plan) {
  return {static_cast<unsigned>(plan.ctas), step.stream};
}

// Bytes of an operand row of k elements.
inline int32_t row_bytes(const StepContext& step, int64_t k) {
  return static_cast<int32_t>(cuda::operand_row_bytes(step.plan->operand, k));
}
// x (count, row_bytes) in expert order.
inline Result<TmaRows> tma_rows(const std::byte* x, int64_t count, int64_t row_bytes) {
  NVFP4_MOE_ASSIGN(const CUtensorMap map,
                   rows_map(x, count, row_bytes, kTmaTileRows, kTmaTileBytesOfRow));
  return TmaRows{map};
}

}  // namespace nvfp4_moe::internal::sm90
