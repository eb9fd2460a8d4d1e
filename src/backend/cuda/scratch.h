// Scratch memory of the CUDA backends, in addition to the layer's arrays: the operands of the
// tensor cores, and the list of tiles, which route builds on the device because the host does not
// know how many rows each expert has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/operand.h"
#include "backend/cuda/run_plan.h"
#include "backend/cuda/steps/sizes.h"
#include "backend/layer_steps.h"
#include "core/config.h"

namespace nvfp4_moe::internal::cuda {

// Consecutive rows of one expert.
struct RowTile {
  int32_t expert;
  int32_t first_row;
  int32_t rows;
};
// quantize's counts for one row of activations.
struct RowCounts {
  uint64_t nonfinite, blocks, saturated, zeroed;
};

struct Scratch {
  // Only nvfp4 and fp8: rows of operand_row_bytes.
  std::byte* hidden_operand = nullptr;  // (T, H)
  // (T, H) for the shared expert's hidden: separate under on_input
  std::byte* shared_hidden_operand = nullptr;
  std::byte* routed_operand = nullptr;  // (R, I) for the intermediate
  std::byte* shared_operand = nullptr;  // (T, Is)
  RowTile* tiles = nullptr;             // (tile_bound)
  int32_t* tile_count = nullptr;        // (1)
  int32_t* lists_wide = nullptr;        // (1) whether tiles are those of the wide configuration
  // (slices, E) rows of each expert in the slice; route_scan replaces them by first rows
  int32_t* slice_counts = nullptr;
  uint32_t* slice_bad_ids = nullptr;    // (slices)
  RowCounts* token_counts = nullptr;    // (T) for a batch that one CTA routes
  uint64_t* discarded_count = nullptr;  // (1) never read: for counts that another kernel makes

  Scratch(const MoeConfig& config, const ExpertRange& range, const RunPlan& plan, Arena& arena) {
    const int64_t tokens = plan.tokens, rows = tokens * config->top_k;
    const bool two_hiddens = router_weight_on_input(config) && config->shared_intermediate_size > 0;
    if (quantizes(config->activation_format)) {
      const auto take = [&](const char* name, int64_t count, int64_t k) {
        return arena.take<std::byte>("cuda.", name, count * operand_row_bytes(plan.operand, k));
      };
      hidden_operand = take("hidden_operand", tokens, config->hidden_size);
      shared_hidden_operand =
          two_hiddens ? take("shared_hidden_operand", tokens, config->hidden_size) : hidden_operand;
      routed_operand = take("routed_operand", rows, config->intermediate_size);
      shared_operand = take("shared_operand", tokens, config->shared_intermediate_size);
    }
    tiles = arena.take<RowTile>("cuda.", "tiles", tile_bound(rows, range.count, kMinTileN));
    tile_count = arena.take<int32_t>("cuda.", "tile_count", 1);
    lists_wide = arena.take<int32_t>("cuda.", "lists_wide", 1);
    const int64_t slices = ceil_div(rows, kRouteSlice);
    slice_counts = arena.take<int32_t>("cuda.", "slice_counts", slices * range.count);
    slice_bad_ids = arena.take<uint32_t>("cuda.", "slice_bad_ids", slices);
    token_counts =
        arena.take<RowCounts>("cuda.", "token_counts", std::min(tokens, kOneCtaAssignments));
    if (two_hiddens) discarded_count = arena.take<uint64_t>("cuda.", "discarded_count", 1);
  }
  // The scratch of a step: its arrays follow the layer's.
  explicit Scratch(const StepContext& step) : Scratch(step, step.scratch) {}

 private:
  Scratch(const StepContext& step, Arena arena)
      : Scratch(step.weights.config, step.weights.range, *step.plan, arena) {}
};

// Operand of gemm1, (T, H) in rows of the plan's format.
inline const std::byte* hidden_rows(const StepContext& step, const PartBuffers& part) {
  if (!quantizes(step.weights.config->activation_format))
    return reinterpret_cast<const std::byte*>(part.hidden.bf16);
  const Scratch scratch(step);
  return &part == &step.buffers.shared ? scratch.shared_hidden_operand : scratch.hidden_operand;
}
// Operand of gemm2, (R, I) in rows of the plan's format. A linear stores it in intermediate.codes.
inline const std::byte* intermediate_rows(const StepContext& step, const PartBuffers& part) {
  if (part.down_only) return reinterpret_cast<const std::byte*>(part.intermediate.codes);
  if (!quantizes(step.weights.config->activation_format))
    return reinterpret_cast<const std::byte*>(part.intermediate.bf16);
  const Scratch scratch(step);
  return &part == &step.buffers.shared ? scratch.shared_operand : scratch.routed_operand;
}
inline const uint16_t* bf16_rows(const std::byte* operand) {
  return reinterpret_cast<const uint16_t*>(operand);
}

}  // namespace nvfp4_moe::internal::cuda
