// route: expert ids -> the rows of each local expert, and the row tiles that the GEMMs process.
//
// Long because the ways of one sort share its arguments, its scan and its bit masks.
//
// topk_ids (T, k) -> row_of_assignment (T k), assignment_of_row (R), row_offsets (E + 1), tiles;
// clears the run's status. A stable counting sort:
//
//   count     rows of each expert in every slice of the assignments        slice_counts (slices, E)
//   scan      row_offsets over the experts, tiles; the first row of an expert in a slice
//   scatter   an assignment's row = that + the earlier assignments of its expert in the slice
//
// Up to 32 assignments are sorted by one warp with shuffles. For more, each expert's assignments
// are a bit mask in shared memory, and the number of earlier assignments is a popcount. One CTA
// handles up to kOneCtaAssignments; above that, each CTA has a slice (route.cu). If the masks do
// not fit into shared memory, each warp sorts a part with its own counters, which needs no atomics
// and keeps the order of the assignments.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/small_batch.cuh"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal::cuda {

// A thread's index in a CTA that routes; route_and_quantize makes such CTAs two-dimensional.
__device__ inline int32_t thread_of_cta() {
  return static_cast<int32_t>(threadIdx.y * blockDim.x + threadIdx.x);
}
__device__ inline int32_t threads_of_cta() { return static_cast<int32_t>(blockDim.x * blockDim.y); }

struct RouteArgs : AssignmentIds {
  int64_t slice;  // assignments per slice
  int32_t slices;
  int32_t segments;  // of 128 assignments each, in the experts' masks; 0: one CTA sorts by slices
  RunStatus* status;
  int32_t* row_of_assignment;  // (assignments)
  int32_t* assignment_of_row;  // (R)
  int64_t* row_offsets;        // (E + 1)
  int tile_n;
  bool even_tiles, widest_first;
  RowTile* tiles;
  int32_t* tile_count;
  int32_t wide_tile_n;          // 0: all tiles have the same width
  int64_t max_narrow_rows;      // with more rows in total, the list has wide tiles
  int32_t* lists_wide;          // (1) whether the list has wide tiles, or null
  int64_t* shared_row_offsets;  // (2), or null
  int64_t tokens, top_k;
  uint32_t* slice_bad_ids;  // (slices); unused by a single CTA
  int32_t* cleared;         // (cleared_count), or null
  int32_t cleared_count;
};

// Calls body(assignment, local expert, lanes of this group with the same expert, bad, end) for a
// slice, in order. Called by one warp.
template <class Body>
__device__ void for_each_group(const RouteArgs& args, int64_t slice, const Body& body) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t begin = slice * args.slice, end = min(begin + args.slice, args.assignments);
#pragma unroll 1
  for (int64_t group = begin; group < end; group += 32) {
    uint32_t bad = 0;
    const int expert = local_expert(args, group + lane, end, bad);
    body(group + lane, expert, __match_any_sync(kAllLanes, expert), bad, end);
    __syncwarp();
  }
}

// counts (E): rows of each expert in the slice. Returns the number of its invalid ids. Called by
// one warp.
__device__ inline unsigned count_slice(const RouteArgs& args, int64_t slice, int32_t* counts) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (int64_t e = lane; e < args.count; e += 32) counts[e] = 0;
  __syncwarp();
  unsigned bad_ids = 0;
  for_each_group(args, slice, [&](int64_t, int expert, unsigned same, uint32_t bad, int64_t) {
    bad_ids += bad;
    if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) counts[expert] += __popc(same);
  });
  return __reduce_add_sync(kAllLanes, bad_ids);
}

// Writes row_of_assignment and assignment_of_row of the slice. counts (E): next row of each expert.
// Called by one warp.
__device__ inline void scatter_slice(const RouteArgs& args, int64_t slice, int32_t* counts) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for_each_group(args, slice,
                 [&](int64_t assignment, int expert, unsigned same, uint32_t, int64_t end) {
                   const int32_t base = expert >= 0 ? counts[expert] : 0;
                   __syncwarp();
                   if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1)
                     counts[expert] = base + __popc(same);
                   if (assignment >= end) return;
                   const int32_t row = expert >= 0 ? base + __popc(same & ((1u << lane) - 1)) : -1;
                   args.row_of_assignment[assignment] = row;
                   if (row >= 0) args.assignment_of_row[row] = static_cast<int32_t>(assignment);
                 });
}

struct Totals {
  int32_t rows = 0, tiles = 0;
};

// Exclusive prefix totals over the CTA's threads; total is that of all. warp_totals: (32) shared.
__device__ inline Totals cta_exclusive(Totals own, Totals* warp_totals, Totals& total) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = thread_of_cta() / 32,
            warps = threads_of_cta() / 32;
  Totals sum = own;
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
    const int32_t rows = __shfl_up_sync(kAllLanes, sum.rows, step),
                  tiles = __shfl_up_sync(kAllLanes, sum.tiles, step);
    if (lane >= step) sum.rows += rows, sum.tiles += tiles;
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  Totals before;
  total = Totals{};
#pragma unroll 1
  for (int w = 0; w < warps; ++w) {
    if (w == warp) before = total;
    total.rows += warp_totals[w].rows;
    total.tiles += warp_totals[w].tiles;
  }
  __syncthreads();
  return {before.rows + sum.rows - own.rows, before.tiles + sum.tiles - own.tiles};
}

// Sort key of an expert in the list of tiles, and its number of tiles.
struct alignas(8) TileKey {
  uint32_t order;  // larger keys first: rows of its tiles, then smaller experts first
  int32_t tiles;

  TileKey() = default;
  __device__ TileKey(int32_t expert, int32_t step, int32_t tiles_)
      : order(static_cast<uint32_t>(step << 16 | (0xFFFF - expert))), tiles(tiles_) {}
  __device__ int32_t step() const { return static_cast<int32_t>(order >> 16); }
};

__device__ inline int32_t tiles_before(const TileKey* keys, int32_t count, uint32_t order) {
  int32_t tiles = 0;
#pragma unroll 8
  for (int32_t e = 0; e < count; ++e) tiles += keys[e].order > order ? keys[e].tiles : 0;
  return tiles;
}

// Replaces the list by one of wide tiles, widest first, and returns their number. row_offsets (E +
// 1) and keys (E) must be written. Called by one CTA.
__device__ inline int32_t list_wide_tiles(const RouteArgs& args, TileKey* keys) {
  const auto count = static_cast<int32_t>(args.count);
  const auto rows_of = [&](int32_t e) {
    return static_cast<int32_t>(args.row_offsets[e + 1] - args.row_offsets[e]);
  };
  __syncthreads();
#pragma unroll 1
  for (int32_t e = thread_of_cta(); e < count; e += threads_of_cta()) {
    const int32_t rows = rows_of(e);
    keys[e] = TileKey(e, even_tile_rows(rows, args.wide_tile_n),
                      (rows + args.wide_tile_n - 1) / args.wide_tile_n);
  }
  __syncthreads();
#pragma unroll 1
  for (int32_t e = thread_of_cta(); e < count; e += threads_of_cta())
    list_tiles(args.tiles, e, static_cast<int32_t>(args.row_offsets[e]), rows_of(e), keys[e].step(),
               tiles_before(keys, count, keys[e].order), keys[e].tiles);
  int32_t tiles = 0;
#pragma unroll 8
  for (int32_t e = 0; e < count; ++e) tiles += keys[e].tiles;
  return tiles;
}

// Writes row_offsets, tiles and all that does not belong to a single assignment. Calls rows_of(e)
// once for each expert, then start_at(e, its first row). bad_ids (slices). keys: (E) shared, if
// widest_first or if tiles may be wide. Returns the total number of rows. Called by one CTA.
template <class RowsOf, class StartAt>
__device__ int32_t scan(const RouteArgs& args, const uint32_t* bad_ids, TileKey* keys,
                        const RowsOf& rows_of, const StartAt& start_at) {
  __shared__ Totals warp_totals[32];
  const int32_t thread = thread_of_cta(), threads = threads_of_cta();
  Totals before;
#pragma unroll 1
  for (int64_t first = 0; first < args.count; first += threads) {
    const int64_t e = first + thread;
    Totals own;
    if (e < args.count) own.rows = rows_of(e);
    own.tiles =
        own.rows <= args.tile_n ? own.rows != 0 : (own.rows + args.tile_n - 1) / args.tile_n;
    Totals total;
    Totals start = cta_exclusive(own, warp_totals, total);
    start.rows += before.rows;
    start.tiles += before.tiles;
    if (e < args.count) {
      args.row_offsets[e] = start.rows;
      const int32_t step = args.even_tiles ? even_tile_rows(own.rows, args.tile_n) : args.tile_n;
      if (args.widest_first)
        keys[e] = TileKey(static_cast<int32_t>(e), step, own.tiles);
      else
        list_tiles(args.tiles, static_cast<int32_t>(e), start.rows, own.rows, step, start.tiles,
                   own.tiles);
      start_at(e, start.rows);
    }
    before.rows += total.rows;
    before.tiles += total.tiles;
  }
  const bool lists_wide = args.wide_tile_n > 0 && before.rows > args.max_narrow_rows;
  if (lists_wide) {
    if (thread == 0) args.row_offsets[args.count] = before.rows;
    before.tiles = list_wide_tiles(args, keys);
  } else if (args.widest_first) {
    if (thread == 0) args.row_offsets[args.count] = before.rows;
    __syncthreads();
#pragma unroll 1
    for (int32_t e = thread; e < args.count; e += threads) {
      const auto first_row = static_cast<int32_t>(args.row_offsets[e]);
      const int32_t rows = static_cast<int32_t>(args.row_offsets[e + 1]) - first_row;
      const TileKey key = keys[e];
      list_tiles(args.tiles, e, first_row, rows, key.step(),
                 tiles_before(keys, static_cast<int32_t>(args.count), key.order), key.tiles);
    }
  }
#pragma unroll 1
  for (int32_t i = thread; i < args.cleared_count; i += threads) args.cleared[i] = 0;
  if (thread >= 32) return before.rows;
  uint32_t own_bad_ids = 0;
  for (int32_t slice = thread; slice < args.slices; slice += 32) own_bad_ids += bad_ids[slice];
  RunStatus status;
  status.bad_expert_ids = __reduce_add_sync(kAllLanes, own_bad_ids);
  if (thread != 0) return before.rows;
  *args.status = status;
  args.row_offsets[args.count] = before.rows;
  *args.tile_count = before.tiles;
  if (args.lists_wide != nullptr) *args.lists_wide = lists_wide;
  if (args.shared_row_offsets != nullptr) {
    args.shared_row_offsets[0] = 0;
    args.shared_row_offsets[1] = args.tokens;
  }
  return before.rows;
}

// counts (slices, E): rows in the slice -> first row of the expert in the slice. Called by one CTA.
__device__ inline void scan_counts(const RouteArgs& args, int32_t* counts, const uint32_t* bad_ids,
                                   TileKey* keys) {
  constexpr int kAtOnce = 8;  // slices whose counts are read at once
  const auto rows_of = [&](int64_t e) {
    int32_t rows = 0;
#pragma unroll kAtOnce
    for (int32_t slice = 0; slice < args.slices; ++slice) rows += counts[slice * args.count + e];
    return rows;
  };
  scan(args, bad_ids, keys, rows_of, [&](int64_t e, int32_t row) {
#pragma unroll 1
    for (int32_t slice = 0; slice < args.slices; slice += kAtOnce) {
      int32_t rows[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        rows[i] = slice + i < args.slices ? counts[(slice + i) * args.count + e] : 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (slice + i < args.slices) counts[(slice + i) * args.count + e] = row;
        row += rows[i];
      }
    }
  });
}

// Shared memory for the whole step in one CTA. masks (segments, E): the assignments of each expert
// as bits, 128 per segment, so that an assignment's rank within its expert is a popcount; before
// (segments, E): the expert's rows in earlier segments; starts (E): first rows; keys (E), if tiles
// are sorted; order (assignments): assignment_of_row, staged for a coalesced write.
struct RouteBits {
  uint4* masks;
  TileKey* keys;
  int32_t* starts;
  uint16_t *before, *order;
  __device__ RouteBits(const RouteArgs& args, void* shared)
      : masks(static_cast<uint4*>(shared)),
        keys(reinterpret_cast<TileKey*>(masks + args.segments * args.count)),
        starts(reinterpret_cast<int32_t*>(
            keys + (args.widest_first || args.wide_tile_n > 0 ? args.count : 0))),
        before(reinterpret_cast<uint16_t*>(starts + args.count)),
        order(before + args.segments * args.count) {}
};

__device__ inline int32_t count_bits(const uint4& mask) {
  return __popc(mask.x) + __popc(mask.y) + __popc(mask.z) + __popc(mask.w);
}
// Counts the bits of a segment's mask for assignments before this one.
__device__ inline int32_t count_bits_before(const uint4& mask, int32_t assignment) {
  const int32_t word = assignment / 32 % 4;
  const uint32_t own = (1u << assignment % 32) - 1;  // for the assignment's own word
  return __popc(mask.x & (word > 0 ? ~0u : own)) +
         __popc(mask.y & (word > 1    ? ~0u
                          : word == 1 ? own
                                      : 0)) +
         __popc(mask.z & (word > 2    ? ~0u
                          : word == 2 ? own
                                      : 0)) +
         __popc(mask.w & (word == 3 ? own : 0));
}
// masks (segments, E) in shared memory.
__device__ inline void set_bit(uint4* masks, int32_t experts, int32_t assignment, int expert) {
  auto* const words =
      reinterpret_cast<uint32_t*>(masks + assignment / kRouteSegment * experts + expert);
  atomicOr(words + assignment / 32 % 4, 1u << assignment % 32);
}

// The local experts of a thread's assignments, or -1; all ids are read at once. bad: counts invalid
// ids.
template <int kPer>
__device__ void read_experts(const RouteArgs& args, int (&experts)[kPer], uint32_t& bad) {
  int64_t ids[kPer];
  const int64_t first = thread_of_cta(), step = threads_of_cta();
#pragma unroll
  for (int i = 0; i < kPer; ++i)
    ids[i] = first + i * step < args.assignments ? global_id(args, first + i * step) : -1;
#pragma unroll
  for (int i = 0; i < kPer; ++i) experts[i] = local_expert(args, ids[i], bad);
}

// kPer: maximum assignments per thread.
template <int kPer>
__device__ void route_by_bits(const RouteArgs& args, void* shared) {
  __shared__ uint32_t bad_ids;
  const RouteBits bits(args, shared);
  const auto count = static_cast<int32_t>(args.count);
  const int32_t thread = thread_of_cta(), threads = threads_of_cta(), masks = args.segments * count;
  int experts[kPer];
  uint32_t bad = 0;
  read_experts(args, experts, bad);
  if (thread == 0) bad_ids = 0;
#pragma unroll 1
  for (int32_t i = thread; i < masks; i += threads) bits.masks[i] = uint4{};
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int32_t assignment = thread + i * threads;
    if (experts[i] >= 0) set_bit(bits.masks, count, assignment, experts[i]);
  }
  if (bad != 0) atomicAdd(&bad_ids, bad);
  __syncthreads();
#pragma unroll 1
  for (int32_t i = thread; i < masks; i += threads)
    bits.before[i] = static_cast<uint16_t>(count_bits(bits.masks[i]));
  __syncthreads();
  const auto rows_of = [&](int64_t e) {
    int32_t rows = 0;
#pragma unroll 8
    for (int32_t segment = 0; segment < args.segments; ++segment) {
      uint16_t& own = bits.before[segment * count + e];
      const int32_t own_rows = own;
      own = static_cast<uint16_t>(rows);
      rows += own_rows;
    }
    return rows;
  };
  const int32_t rows = scan(args, &bad_ids, bits.keys, rows_of,
                            [&](int64_t e, int32_t row) { bits.starts[e] = row; });
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int32_t assignment = thread + i * threads;
    if (assignment >= args.assignments) continue;
    int32_t row = -1;
    if (experts[i] >= 0) {
      const int32_t at = assignment / kRouteSegment * count + experts[i];
      row =
          bits.starts[experts[i]] + bits.before[at] + count_bits_before(bits.masks[at], assignment);
      bits.order[row] = static_cast<uint16_t>(assignment);
    }
    args.row_of_assignment[assignment] = row;
  }
  __syncthreads();
#pragma unroll 1
  for (int32_t row = thread; row < rows; row += threads)
    args.assignment_of_row[row] = bits.order[row];
}

// The whole step in one CTA, for up to 32 assignments. Every warp computes the same batch; experts
// are divided among threads.
__device__ inline void route_small_batch(const RouteArgs& args) {
  const SmallBatch own(args, args.tile_n);
  const int lane = SmallBatch::lane();
  const auto bad_ids = static_cast<uint64_t>(__popc(__ballot_sync(kAllLanes, own.bad != 0)));
  const int32_t all_rows = own.all_rows();
#pragma unroll 1
  for (int64_t e = thread_of_cta(); e < (args.count + 31) / 32 * 32; e += threads_of_cta()) {
    int32_t before = 0;
#pragma unroll 4
    for (int other = 0; other < static_cast<int>(args.assignments); ++other) {
      const int other_expert = __shfl_sync(kAllLanes, own.expert, other);
      before += other_expert >= 0 && other_expert < e;
    }
    if (e < args.count) args.row_offsets[e] = before;
  }
#pragma unroll 1
  for (int32_t i = thread_of_cta(); i < args.cleared_count; i += threads_of_cta())
    args.cleared[i] = 0;
  if (thread_of_cta() >= 32) return;
  if (lane < args.assignments) {
    const int32_t row = own.row();
    args.row_of_assignment[lane] = row;
    if (row >= 0) args.assignment_of_row[row] = lane;
  }
  own.list(args.tiles, args.tile_n, args.even_tiles);
  if (lane != 0) return;
  RunStatus status;
  status.bad_expert_ids = bad_ids;
  *args.status = status;
  args.row_offsets[args.count] = all_rows;
  *args.tile_count = own.all_tiles;
  if (args.shared_row_offsets != nullptr) {
    args.shared_row_offsets[0] = 0;
    args.shared_row_offsets[1] = args.tokens;
  }
}

// The whole step in one CTA; if the masks do not fit, each warp has a slice. shared: 16-byte
// aligned.
__device__ inline void route_by_one_cta(const RouteArgs& args, void* shared) {
  if (args.assignments <= kSmallBatch) return route_small_batch(args);
  if (args.segments > 0)
    return args.assignments <= threads_of_cta()
               ? route_by_bits<1>(args, shared)
               : route_by_bits<kAssignmentsPerThread>(args, shared);
  __shared__ uint32_t bad_ids[32];
  const int warp = thread_of_cta() / 32;
  auto* const counts = static_cast<int32_t*>(shared);  // (slices, E)
  int32_t* const own = counts + warp * args.count;
  if (warp < args.slices) bad_ids[warp] = count_slice(args, warp, own);
  __syncthreads();
  scan_counts(args, counts, bad_ids,
              reinterpret_cast<TileKey*>(counts + (args.slices * args.count + 1) / 2 * 2));
  __syncthreads();
  if (warp < args.slices) scatter_slice(args, warp, own);
}

inline RouteArgs route_args(const StepContext& step, int32_t* cleared) {
  const Batch& batch = step.batch;
  const RoutePlan& plan = step.plan->route;
  const Scratch scratch(step);
  RouteArgs args{};
  static_cast<AssignmentIds&>(args) = assignment_ids(step);
  args.slice = plan.slice;
  args.slices = plan.slices;
  args.segments = plan.segments;
  args.status = step.buffers.status;
  args.row_of_assignment = step.buffers.row_of_assignment;
  args.assignment_of_row = step.buffers.routed.assignment_of_row;
  args.row_offsets = step.buffers.routed.row_offsets;
  args.tile_n = plan.tile_n;
  args.even_tiles = plan.even_tiles;
  args.widest_first = plan.widest_first;
  args.tiles = scratch.tiles;
  args.tile_count = scratch.tile_count;
  args.wide_tile_n = plan.wide_tile_n;
  args.max_narrow_rows = plan.max_narrow_rows;
  args.lists_wide = plan.wide_tile_n > 0 ? scratch.lists_wide : nullptr;
  args.shared_row_offsets =
      step.buffers.shared.experts > 0 ? step.buffers.shared.row_offsets : nullptr;
  args.tokens = batch.tokens;
  args.top_k = step.weights.config->top_k;
  args.slice_bad_ids = scratch.slice_bad_ids;
  args.cleared = cleared;
  args.cleared_count = plan.cleared_counters;
  return args;
}

}  // namespace nvfp4_moe::internal::cuda
