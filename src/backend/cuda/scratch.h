// What the CUDA backends keep beside the layer's arrays: the tensor cores' operands and
// the work list that route builds on the device, since no one on the host knows how many rows an expert has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/packed_tile.h"
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
struct LineCounts {
  uint64_t nonfinite, blocks, saturated, zeroed;
};

// Rows of a tile: the smallest of the compiled ones that holds an expert's average share. A row's bits do not depend on
// it.
inline constexpr int kSmallTileRows = 16;
inline constexpr int kLargeTileRows = 64;
inline constexpr int kLeastTileRows = 8;  // of any backend that shares route
inline int tile_rows(const MoeConfig& config, int64_t tokens) {
  return tokens * config->top_k <= kSmallTileRows * config->num_experts ? kSmallTileRows : kLargeTileRows;
}
inline int shared_tile_rows(int64_t tokens) { return tokens <= kSmallTileRows ? kSmallTileRows : kLargeTileRows; }
// Rows of each of an expert's tiles but the last, where they share its rows evenly instead of filling all but the last.
// Multiples of 8; as many tiles as full ones, and none is empty.
NVFP4_MOE_HOST_DEVICE constexpr int32_t even_tile_rows(int32_t rows, int32_t rows_of_tile) {
  if (rows <= rows_of_tile) return rows == 0 ? rows_of_tile : (rows + 7) / 8 * 8;  // no division for most
  const int32_t tiles = (rows + rows_of_tile - 1) / rows_of_tile;
  return (rows + 8 * tiles - 1) / (8 * tiles) * 8;
}
// No routing gives more tiles than this: each expert with rows has one that may not be full.
inline int64_t tile_bound(int64_t rows, int64_t experts, int rows_of_tile) {
  return std::min(rows, rows / rows_of_tile + experts);
}

// Choices that one block of route counts and places, where there are more than one block takes.
inline constexpr int kRouteChunk = 1024;
// Up to so many choices are routed by one thread block.
inline constexpr int64_t kRouteOneBlock = 2048;

struct Scratch {
  uint16_t* hidden_operand = nullptr;  // (T, H) bf16, e2m1 * e4m3 exactly; nvfp4 only
  uint16_t* routed_operand = nullptr;  // (R, I) the same of the intermediate
  uint16_t* shared_operand = nullptr;  // (T, Is)
  RowTile* tiles = nullptr;            // (tile_bound)
  int32_t* tile_count = nullptr;       // (1)
  int32_t* chunk_counts = nullptr;     // (chunks, E) rows of each expert before and in a chunk of choices
  uint32_t* chunk_bad_ids = nullptr;   // (chunks)
  LineCounts* token_counts = nullptr;  // (T) of batches that one block routes

  Scratch(const MoeConfig& config, const ExpertRange& range, int64_t tokens, Arena& arena) {
    const int64_t rows = tokens * config->top_k;
    if (config->activation_format == ActivationFormat::kNvfp4) {
      hidden_operand = arena.take<uint16_t>("cuda.", "hidden_operand", tokens * config->hidden_size);
      routed_operand = arena.take<uint16_t>("cuda.", "routed_operand", rows * config->intermediate_size);
      shared_operand = arena.take<uint16_t>("cuda.", "shared_operand", tokens * config->shared_intermediate_size);
    }
    tiles = arena.take<RowTile>("cuda.", "tiles", tile_bound(rows, range.count, kLeastTileRows));
    tile_count = arena.take<int32_t>("cuda.", "tile_count", 1);
    const int64_t chunks = (rows + kRouteChunk - 1) / kRouteChunk;
    chunk_counts = arena.take<int32_t>("cuda.", "chunk_counts", chunks * range.count);
    chunk_bad_ids = arena.take<uint32_t>("cuda.", "chunk_bad_ids", chunks);
    token_counts = arena.take<LineCounts>("cuda.", "token_counts", std::min(tokens, kRouteOneBlock));
  }
  // Of a step: its arrays lie behind the layer's.
  explicit Scratch(const StepContext& step) : Scratch(step, step.scratch) {}

 private:
  Scratch(const StepContext& step, Arena arena)
      : Scratch(step.weights.config, step.weights.range, step.batch.tokens, arena) {}
};

}  // namespace nvfp4_moe::cuda
