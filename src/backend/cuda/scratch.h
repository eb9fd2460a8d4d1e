// What the CUDA backends keep beside the layer's arrays: the operands of the tensor cores, and the list of tiles, which
// route builds on the device because the host does not know how many rows an expert has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/run_plan.h"
#include "backend/cuda/steps/sizes.h"
#include "backend/layer_steps.h"
#include "core/config.h"

namespace nvfp4_moe::cuda {

// Consecutive rows of one expert.
struct RowTile {
  int32_t expert;
  int32_t first_row;
  int32_t rows;
};
// What quantize counts in one row of activations.
struct RowCounts {
  uint64_t nonfinite, blocks, saturated, zeroed;
};

struct Scratch {
  uint16_t* hidden_operand = nullptr;         // (T, H) bf16, e2m1 * e4m3 exactly; nvfp4 only
  uint16_t* shared_hidden_operand = nullptr;  // (T, H) the same of the shared expert's hidden: its own on_input
  uint16_t* routed_operand = nullptr;         // (R, I) the same of the intermediate
  uint16_t* shared_operand = nullptr;         // (T, Is)
  RowTile* tiles = nullptr;                   // (tile_bound)
  int32_t* tile_count = nullptr;              // (1)
  int32_t* slice_counts = nullptr;            // (slices, E) rows of each expert: before the slice and in it
  uint32_t* slice_bad_ids = nullptr;          // (slices)
  RowCounts* token_counts = nullptr;          // (T) of a batch that one CTA routes
  uint64_t* discarded_count = nullptr;        // (1) that nobody reads: of what another kernel counts

  Scratch(const MoeConfig& config, const ExpertRange& range, int64_t tokens, Arena& arena) {
    const int64_t rows = tokens * config->top_k;
    const bool two_hiddens = weighs_hidden(config) && config->shared_intermediate_size > 0;
    if (config->activation_format == ActivationFormat::kNvfp4) {
      hidden_operand = arena.take<uint16_t>("cuda.", "hidden_operand", tokens * config->hidden_size);
      shared_hidden_operand = two_hiddens
                                  ? arena.take<uint16_t>("cuda.", "shared_hidden_operand", tokens * config->hidden_size)
                                  : hidden_operand;
      routed_operand = arena.take<uint16_t>("cuda.", "routed_operand", rows * config->intermediate_size);
      shared_operand = arena.take<uint16_t>("cuda.", "shared_operand", tokens * config->shared_intermediate_size);
    }
    tiles = arena.take<RowTile>("cuda.", "tiles", tile_bound(rows, range.count, kMinTileN));
    tile_count = arena.take<int32_t>("cuda.", "tile_count", 1);
    const int64_t slices = ceil_div(rows, kRouteSlice);
    slice_counts = arena.take<int32_t>("cuda.", "slice_counts", slices * range.count);
    slice_bad_ids = arena.take<uint32_t>("cuda.", "slice_bad_ids", slices);
    token_counts = arena.take<RowCounts>("cuda.", "token_counts", std::min(tokens, kOneCtaAssignments));
    if (two_hiddens) discarded_count = arena.take<uint64_t>("cuda.", "discarded_count", 1);
  }
  // The scratch of a step: its arrays lie behind the layer's.
  explicit Scratch(const StepContext& step) : Scratch(step, step.scratch) {}

 private:
  Scratch(const StepContext& step, Arena arena)
      : Scratch(step.weights.config, step.weights.range, step.batch.tokens, arena) {}
};

}  // namespace nvfp4_moe::cuda
