// What both GEMMs take from a call: their sides, and how many tiles of lines there may be.
#pragma once

#include "backend/cuda/packed_layout.h"
#include "backend/cuda/scratch.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::cuda {

// One part of a layer as a grouped GEMM sees it.
struct PartTiles {
  bool shared;
  const PartLayout& layout;
  int rows_of_tile;    // kSmallTileRows or kLargeTileRows
  int64_t tile_bound;  // of lines

  PartTiles(const StepContext& step, const PartBuffers& part, const PackedLayout& packed)
      : shared(&part == &step.buffers.shared),
        layout(shared ? packed.shared : packed.routed),
        rows_of_tile(shared ? shared_tile_rows(step.batch.tokens) : tile_rows(step.weights.config, step.batch.tokens)),
        tile_bound(shared
                       ? ceil_div(step.batch.tokens, rows_of_tile)
                       : cuda::tile_bound(step.batch.tokens * step.weights.config->top_k, part.experts, rows_of_tile)) {
  }
};

}  // namespace nvfp4_moe::cuda
