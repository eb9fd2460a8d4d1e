// Reads the tiles of rows that route has listed for a grouped GEMM. Dense rows have no list; their
// tiles are consecutive.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/scratch.h"

namespace nvfp4_moe::internal::cuda {

// The rows of one tile.
struct TileRows {
  int64_t first;
  int32_t expert, count;
};

struct RowTileList {
  const RowTile* tiles;        // (count) from route; null: one expert with dense rows
  const int32_t* count;        // (1)
  const int64_t* row_offsets;  // (2) for dense rows
};

// Read from L2: L1 may hold values from before route.
template <int kTileN>
__device__ TileRows rows_of_tile(const RowTileList& list, int32_t n_tile) {
  if (list.tiles == nullptr) {
    const int64_t first = int64_t{n_tile} * kTileN;
    return {first, 0,
            static_cast<int32_t>(min(int64_t{kTileN}, __ldcg(list.row_offsets + 1) - first))};
  }
  const int32_t* const tile = reinterpret_cast<const int32_t*>(list.tiles + n_tile);
  return {__ldcg(tile + 1), __ldcg(tile), __ldcg(tile + 2)};
}
template <int kTileN>
__device__ int32_t count_row_tiles(const RowTileList& list) {
  return list.tiles != nullptr
             ? __ldcg(list.count)
             : static_cast<int32_t>((__ldcg(list.row_offsets + 1) + kTileN - 1) / kTileN);
}

}  // namespace nvfp4_moe::internal::cuda
