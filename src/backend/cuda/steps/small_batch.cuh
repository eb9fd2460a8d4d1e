// The assignments of a batch, and routing of up to 32 of them in one warp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/scratch.h"

namespace nvfp4_moe::internal::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct AssignmentIds {
  const void* ids;  // (assignments) int32 or int64, global
  bool wide_ids;
  int64_t assignments;
  int64_t num_experts;   // global
  int64_t first, count;  // the local range
};

inline AssignmentIds assignment_ids(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  return {step.batch.topk_ids,
          step.batch.ids_dtype == DType::kI64,
          step.batch.tokens * config->top_k,
          config->num_experts,
          step.weights.range.first,
          step.weights.range.count};
}

// Read from L2: a kernel may read ids before the kernel that wrote them is known to have ended
// (sm90's gemm1).
__device__ inline int64_t global_id(const AssignmentIds& args, int64_t assignment) {
  return args.wide_ids ? __ldcg(static_cast<const long long*>(args.ids) + assignment)
                       : __ldcg(static_cast<const int32_t*>(args.ids) + assignment);
}

// The local expert of an id, or -1: no expert, another rank's, or an invalid id, which `bad`
// counts.
__device__ inline int local_expert(const AssignmentIds& args, int64_t id, uint32_t& bad) {
  const bool no_expert = id < -1 || id >= args.num_experts;
  bad += no_expert;
  return !no_expert && id >= args.first && id < args.first + args.count
             ? static_cast<int>(id - args.first)
             : -1;
}
// The same for an assignment below `end`; -1 beyond.
__device__ inline int local_expert(const AssignmentIds& args, int64_t assignment, int64_t end,
                                   uint32_t& bad) {
  return assignment < end ? local_expert(args, global_id(args, assignment), bad) : -1;
}

// Writes the tiles of one expert's rows, `step` rows each, from first_tile on.
__device__ inline void list_tiles(RowTile* to, int32_t expert, int32_t first_row, int32_t rows,
                                  int32_t step, int32_t first_tile, int32_t tiles) {
#pragma unroll 1
  for (int32_t t = 0; t < tiles; ++t)
    to[first_tile + t] = {expert, first_row + t * step, min(step, rows - t * step)};
}

// Up to 32 assignments, one per lane, routed by one warp. Lanes read each other's assignments by
// shuffles.
struct SmallBatch {
  int expert;                                 // of this lane's assignment, or -1
  uint32_t bad = 0;                           // 1: its id is invalid
  unsigned same;                              // lanes with the same expert
  bool first;                                 // in its expert: this lane lists the expert's tiles
  int32_t tiles;                              // of its expert if first, else 0
  int32_t rows_before = 0, tiles_before = 0;  // of experts with a smaller index
  int32_t all_tiles = 0;

  __device__ SmallBatch(const AssignmentIds& args, int tile_n) {
    expert = local_expert(args, lane(), args.assignments, bad);
    same = __match_any_sync(kAllLanes, expert);
    first = expert >= 0 && lane() == __ffs(static_cast<int>(same)) - 1;
    tiles = first ? (rows() <= tile_n ? 1 : (rows() + tile_n - 1) / tile_n) : 0;
#pragma unroll 4
    for (int other = 0; other < static_cast<int>(args.assignments); ++other) {
      const int other_expert = __shfl_sync(kAllLanes, expert, other);
      const int32_t other_tiles = __shfl_sync(kAllLanes, tiles, other);
      const bool before = other_expert >= 0 && other_expert < expert;
      rows_before += before;
      tiles_before += before ? other_tiles : 0;
      all_tiles += other_tiles;
    }
  }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ int32_t rows() const { return __popc(same); }  // of its expert
  // The row of this lane's assignment, or -1. Assignments of one expert keep their order.
  __device__ int32_t row() const {
    return expert >= 0 ? rows_before + __popc(same & ((1u << lane()) - 1)) : -1;
  }
  __device__ int32_t all_rows() const { return __popc(__ballot_sync(kAllLanes, expert >= 0)); }
  // Lists the tiles of this lane's expert, if `first`.
  __device__ void list(RowTile* to, int tile_n, bool even_tiles) const {
    if (!first) return;
    list_tiles(to, expert, rows_before, rows(),
               even_tiles ? even_tile_rows(rows(), tile_n) : tile_n, tiles_before, tiles);
  }
};

}  // namespace nvfp4_moe::internal::cuda
