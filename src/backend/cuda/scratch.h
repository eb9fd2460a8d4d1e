// What the CUDA backends keep beside the layer's arrays: the tensor cores' operands and
// the work list that route builds on the device, since no one on the host knows how many rows an expert has.
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
// What quantize counted in one line.
struct RowCounts {
  uint64_t nonfinite, blocks, saturated, zeroed;
};

struct Scratch {
  uint16_t* hidden_operand = nullptr;  // (T, H) bf16, e2m1 * e4m3 exactly; nvfp4 only
  uint16_t* routed_operand = nullptr;  // (R, I) the same of the intermediate
  uint16_t* shared_operand = nullptr;  // (T, Is)
  RowTile* tiles = nullptr;            // (tile_bound)
  int32_t* tile_count = nullptr;       // (1)
  int32_t* chunk_counts = nullptr;     // (chunks, E) rows of each expert before and in a chunk of choices
  uint32_t* chunk_bad_ids = nullptr;   // (chunks)
  RowCounts* token_counts = nullptr;   // (T) of batches that one block routes

  Scratch(const MoeConfig& config, const ExpertRange& range, int64_t tokens, Arena& arena) {
    const int64_t rows = tokens * config->top_k;
    if (config->activation_format == ActivationFormat::kNvfp4) {
      hidden_operand = arena.take<uint16_t>("cuda.", "hidden_operand", tokens * config->hidden_size);
      routed_operand = arena.take<uint16_t>("cuda.", "routed_operand", rows * config->intermediate_size);
      shared_operand = arena.take<uint16_t>("cuda.", "shared_operand", tokens * config->shared_intermediate_size);
    }
    tiles = arena.take<RowTile>("cuda.", "tiles", tile_bound(rows, range.count, kMinTileN));
    tile_count = arena.take<int32_t>("cuda.", "tile_count", 1);
    const int64_t chunks = ceil_div(rows, kRouteChunk);
    chunk_counts = arena.take<int32_t>("cuda.", "chunk_counts", chunks * range.count);
    chunk_bad_ids = arena.take<uint32_t>("cuda.", "chunk_bad_ids", chunks);
    token_counts = arena.take<RowCounts>("cuda.", "token_counts", std::min(tokens, kOneCtaAssignments));
  }
  // Of a step: its arrays lie behind the layer's.
  explicit Scratch(const StepContext& step) : Scratch(step, step.scratch) {}

 private:
  Scratch(const StepContext& step, Arena arena)
      : Scratch(step.weights.config, step.weights.range, step.batch.tokens, arena) {}
};

}  // namespace nvfp4_moe::cuda
