// route's kernels and their launches.
#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/route.cuh"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::cuda {
namespace {

__global__ void __launch_bounds__(kRouteManyThreads) route_one_cta(RouteArgs args) {
  extern __shared__ uint4 route_shared[];
  ptx::launch_dependents();
  ptx::grid_dependency_wait();
  route_by_one_cta(args, route_shared);
}

// Rows of each expert in a block's chunk, in any order.
__global__ void __launch_bounds__(kRouteChunk) route_count(RouteArgs args, int32_t* chunk_counts) {
  extern __shared__ int32_t counts[];  // (E)
  ptx::launch_dependents();
  ptx::grid_dependency_wait();
  const auto thread = static_cast<int64_t>(threadIdx.x), chunk = static_cast<int64_t>(blockIdx.x);
  uint32_t bad = 0;
  const int expert = local_expert(args, chunk * kRouteChunk + thread, args.assignments, bad);
  for (int64_t e = thread; e < args.count; e += kRouteChunk) counts[e] = 0;
  __syncthreads();
  if (expert >= 0) atomicAdd(counts + expert, 1);
  const int bad_ids = __syncthreads_count(bad != 0);
  for (int64_t e = thread; e < args.count; e += kRouteChunk) chunk_counts[chunk * args.count + e] = counts[e];
  if (thread == 0) args.chunk_bad_ids[chunk] = static_cast<uint32_t>(bad_ids);
}

// scan and place in one, where there are few chunks and few enough experts: each block adds up all chunks' counts for
// itself and places its chunk by bits, and one block more lists the tiles.
struct PlaceBits {
  static constexpr int32_t kSegments = kChunkSegments;
  uint4* masks;     // (kSegments, E)
  int32_t* firsts;  // (kSegments, E) first rows
  int32_t* totals;  // (E) rows
  int32_t* starts;  // (E) rows of earlier chunks, then first rows in the chunk
  TileKey* keys;    // (E), of the block that has no chunk, in the place of masks
  __device__ PlaceBits(uint4* shared, int64_t experts)
      : masks(shared),
        firsts(reinterpret_cast<int32_t*>(masks + kSegments * experts)),
        totals(firsts + kSegments * experts),
        starts(totals + experts),
        keys(reinterpret_cast<TileKey*>(shared)) {}
};

// totals and starts += what a thread has of all chunks' counts. All warps: some experts' chunks each.
__device__ void add_counts(const RouteArgs& args, const int32_t* chunk_counts, int32_t chunk, const PlaceBits& bits) {
  constexpr int32_t kWarps = kRouteChunk / 32;
  const int32_t count = static_cast<int32_t>(args.count), groups = (count + 31) / 32;
  const int32_t shares = groups < kWarps ? kWarps / groups : 1;  // of one group's chunks
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32), share = warp / groups;
  if (shares > 1 && share >= shares) return;
  for (int32_t group = shares > 1 ? warp % groups : warp; group < groups; group += kWarps) {
    const int32_t e = group * 32 + static_cast<int32_t>(threadIdx.x % 32);
    if (e >= count) continue;
    int32_t total = 0, before = 0;
#pragma unroll 16
    for (int32_t c = shares > 1 ? share : 0; c < args.chunks; c += shares) {
      const int32_t rows = __ldcg(chunk_counts + int64_t{c} * count + e);
      total += rows;
      before += c < chunk ? rows : 0;
    }
    atomicAdd(bits.totals + e, total);
    atomicAdd(bits.starts + e, before);
  }
}

__global__ void __launch_bounds__(kRouteChunk) route_place_by_bits(RouteArgs args, const int32_t* chunk_counts) {
  extern __shared__ uint4 route_shared[];
  __shared__ Totals warp_totals[32];
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const auto thread = static_cast<int32_t>(threadIdx.x), chunk = static_cast<int32_t>(blockIdx.x);
  const auto count = static_cast<int32_t>(args.count);
  const PlaceBits bits(route_shared, count);
  const bool lists = chunk == args.chunks;
  const int64_t assignment = int64_t{chunk} * kRouteChunk + thread;
  uint32_t bad = 0;
  const int expert = local_expert(args, assignment, args.assignments, bad);  // beyond all of them where it lists
  for (int32_t i = thread; i < PlaceBits::kSegments * count; i += kRouteChunk) bits.masks[i] = uint4{};
  for (int32_t e = thread; e < count; e += kRouteChunk) bits.totals[e] = bits.starts[e] = 0;
  __syncthreads();
  add_counts(args, chunk_counts, chunk, bits);
  if (expert >= 0) set_bit(bits.masks, count, thread, expert);
  __syncthreads();
  if (lists) {
    scan(
        args, args.chunk_bad_ids, bits.keys, [&](int64_t e) { return bits.totals[e]; }, [](int64_t, int32_t) {});
    return;
  }
  int32_t before = 0;
  for (int32_t first = 0; first < count; first += kRouteChunk) {
    const int32_t e = first + thread;
    Totals own, total;
    if (e < count) own.rows = bits.totals[e];
    int32_t row = before + cta_exclusive(own, warp_totals, total).rows;
    before += total.rows;
    if (e >= count) continue;
    row += bits.starts[e];
#pragma unroll
    for (int32_t segment = 0; segment < PlaceBits::kSegments; ++segment) {
      bits.firsts[segment * count + e] = row;
      row += count_bits(bits.masks[segment * count + e]);
    }
  }
  __syncthreads();
  if (assignment >= args.assignments) return;
  int32_t row = -1;
  if (expert >= 0) {
    const int32_t at = thread / kRouteSegment * count + expert;
    row = bits.firsts[at] + count_bits_before(bits.masks[at], thread);
    args.assignment_of_row[row] = static_cast<int32_t>(assignment);
  }
  args.row_of_assignment[assignment] = row;
}

// Any number of chunks and experts: counts become first rows, and a warp each places its part of a chunk.
__global__ void route_scan(RouteArgs args, int32_t* chunk_counts) {
  ptx::launch_dependents();
  ptx::grid_dependency_wait();
  extern __shared__ TileKey keys[];  // (E), under widest_first
  scan_counts(args, chunk_counts, args.chunk_bad_ids, keys);
}
__global__ void route_place(RouteArgs args, int32_t* chunk_counts) {
  extern __shared__ int32_t counts[];  // (warps, E)
  ptx::launch_dependents();
  ptx::grid_dependency_wait();
  const auto parts = static_cast<int32_t>(blockDim.x / 32), own = static_cast<int32_t>(threadIdx.x / 32);
  args.chunk /= parts;
  const int64_t part = int64_t{blockIdx.x} * parts + own;
  count_chunk(args, part, counts + own * args.count);
  __syncthreads();
  for (int64_t e = threadIdx.x; e < args.count; e += blockDim.x) {
    int32_t row = chunk_counts[blockIdx.x * args.count + e];
    for (int32_t p = 0; p < parts; ++p) {
      const int32_t rows = counts[p * args.count + e];
      counts[p * args.count + e] = row;
      row += rows;
    }
  }
  __syncthreads();
  place_chunk(args, part, counts + own * args.count);
}

}  // namespace

Status route(const StepContext& step, int32_t* cleared) {
  const RoutePlan& plan = step.plan->route;
  const RouteArgs args = route_args(step, cleared);
  if (plan.kernel == RouteKernel::kOneCta)
    return launch<route_one_cta>("route", 1, plan.threads, plan.shared_bytes, step.stream, args);
  int32_t* const chunk_counts = Scratch(step).chunk_counts;
  const auto chunks = static_cast<unsigned>(args.chunks);
  const int64_t counter_bytes = args.count * static_cast<int64_t>(sizeof(int32_t));
  NVFP4_MOE_TRY(
      launch<route_count>("route_count", chunks, kRouteChunk, counter_bytes, step.stream, args, chunk_counts));
  if (plan.kernel == RouteKernel::kPlaceByBits)
    return launch<route_place_by_bits>("route_place_by_bits", chunks + 1, plan.threads, plan.shared_bytes, step.stream,
                                       args, chunk_counts);
  const int64_t key_bytes = args.widest_first ? args.count * kTileKeyBytes : 0;
  NVFP4_MOE_TRY(launch<route_scan>("route_scan", 1, 1024, key_bytes, step.stream, args, chunk_counts));
  return launch<route_place>("route_place", chunks, plan.chunk_parts * 32, plan.shared_bytes, step.stream, args,
                             chunk_counts);
}

}  // namespace nvfp4_moe::cuda
