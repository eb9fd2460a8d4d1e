// What both GEMMs take from a call: the part's sides and its variant.
#pragma once

#include "backend/cuda/packed_layout.h"
#include "backend/sm90/gemm.cuh"
#include "backend/sm90/scratch.h"
#include "backend/sm90/tensor_map.h"

namespace nvfp4_moe::sm90 {

struct PartPlan {
  bool shared;
  const cuda::PartLayout& layout;
  size_t variant;  // of kVariants

  PartPlan(const StepContext& step, const PartBuffers& part, const cuda::PackedLayout& packed)
      : shared(&part == &step.buffers.shared),
        layout(shared ? packed.shared : packed.routed),
        variant(shared ? shared_variant(step.batch.tokens)
                       : routed_variant(step.weights.config, step.weights.range, step.batch.tokens)) {}
};

inline int32_t blocks_of_device() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count < kMostBlocks ? count : kMostBlocks;
}

// All but weights, x, k and routed.
inline GemmArgs gemm_args(const StepContext& step, const PartBuffers& part, const PartPlan& plan,
                          const cuda::MatrixTiles& tiles, const Scratch& scratch) {
  GemmArgs args{};
  args.expert_stride = plan.layout.expert_stride;
  args.row_tiles = static_cast<int32_t>(tiles.row_tiles);
  args.k_tiles = static_cast<int32_t>(tiles.k_tiles);
  args.work = WorkShape(static_cast<int32_t>(cuda::ceil_div(tiles.row_tiles, kVariants[plan.variant].row_blocks)),
                        args.k_tiles, blocks_of_device(), splits(step.weights.config, tiles.k_tiles),
                        static_cast<int32_t>(least_saved_chunks(kVariants[plan.variant])),
                        most_pieces(kVariants[plan.variant]));
  args.by_top_k = Divider(static_cast<int32_t>(step.weights.config->top_k));
  args.row_offsets = part.row_offsets;
  args.tiles = plan.shared ? nullptr : scratch.common.tiles;
  args.tile_count = scratch.common.tile_count;
  args.partials = scratch.partials;
  args.arrivals = scratch.arrivals;
  return args;
}

// (count, k) in the order of the rows.
inline TensorLines tensor_lines(const uint16_t* x, int64_t count, int64_t k) {
  return {lines_map(x, count, k, kBoxLines, kBoxK)};
}

// body(std::integral_constant<size_t, variant>) of a variant known at run time.
template <class Body, size_t kVariant = 0>
void with_variant(size_t variant, const Body& body) {
  if constexpr (kVariant < kVariants.size()) {
    if (variant == kVariant)
      body(std::integral_constant<size_t, kVariant>{});
    else
      with_variant<Body, kVariant + 1>(variant, body);
  }
}

}  // namespace nvfp4_moe::sm90
