// The kernels of route, and their launches.
#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/route.cuh"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal::cuda {
namespace {

__global__ void __launch_bounds__(kRouteLargeThreads) route_one_cta(RouteArgs args) {
  extern __shared__ uint4 route_shared[];
  ptx::launch_dependents();
  ptx::grid_dependency_wait();
  route_by_one_cta(args, route_shared);
}

// Counts the rows of each expert in a CTA's slice, in any order.
__global__ void __launch_bounds__(kRouteSlice) route_count(RouteArgs args, int32_t* slice_counts) {
  extern __shared__ int32_t counts[];  // (E)
  ptx::launch_dependents();
  ptx::grid_dependency_wait();
  const auto thread = static_cast<int64_t>(threadIdx.x), slice = static_cast<int64_t>(blockIdx.x);
  uint32_t bad = 0;
  const int expert = local_expert(args, slice * kRouteSlice + thread, args.assignments, bad);
  for (int64_t e = thread; e < args.count; e += kRouteSlice) counts[e] = 0;
  __syncthreads();
  if (expert >= 0) atomicAdd(counts + expert, 1);
  const int bad_ids = __syncthreads_count(bad != 0);
  for (int64_t e = thread; e < args.count; e += kRouteSlice)
    slice_counts[slice * args.count + e] = counts[e];
  if (thread == 0) args.slice_bad_ids[slice] = static_cast<uint32_t>(bad_ids);
}

// scan and scatter in one kernel, for few slices and experts. Each CTA adds up all slices' counts
// and scatters its own slice with bit masks; one extra CTA lists the tiles.
struct ScatterBits {
  static constexpr int32_t kSegments = kSliceSegments;
  uint4* masks;     // (kSegments, E)
  int32_t* firsts;  // (kSegments, E) first rows
  int32_t* totals;  // (E) rows
  int32_t* starts;  // (E) rows of earlier slices, then first rows in this slice
  TileKey* keys;    // (E) for the extra CTA, in the memory of masks
  __device__ ScatterBits(uint4* shared, int64_t experts)
      : masks(shared),
        firsts(reinterpret_cast<int32_t*>(masks + kSegments * experts)),
        totals(firsts + kSegments * experts),
        starts(totals + experts),
        keys(reinterpret_cast<TileKey*>(shared)) {}
};

// Adds a thread's share of all slices' counts to totals and starts. Called by all warps: each takes
// some slices of some experts.
__device__ void add_counts(const RouteArgs& args, const int32_t* slice_counts, int32_t slice,
                           const ScatterBits& bits) {
  constexpr int32_t kWarps = kRouteSlice / 32;
  const int32_t count = static_cast<int32_t>(args.count), groups = (count + 31) / 32;
  const int32_t shares = groups < kWarps ? kWarps / groups : 1;  // of the slices of one group
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32), share = warp / groups;
  if (shares > 1 && share >= shares) return;
  for (int32_t group = shares > 1 ? warp % groups : warp; group < groups; group += kWarps) {
    const int32_t e = group * 32 + static_cast<int32_t>(threadIdx.x % 32);
    if (e >= count) continue;
    int32_t total = 0, before = 0;
#pragma unroll 16
    for (int32_t c = shares > 1 ? share : 0; c < args.slices; c += shares) {
      const int32_t rows = __ldcg(slice_counts + int64_t{c} * count + e);
      total += rows;
      before += c < slice ? rows : 0;
    }
    atomicAdd(bits.totals + e, total);
    atomicAdd(bits.starts + e, before);
  }
}

__global__ void __launch_bounds__(kRouteSlice)
    route_scatter_by_bits(RouteArgs args, const int32_t* slice_counts) {
  extern __shared__ uint4 route_shared[];
  __shared__ Totals warp_totals[32];
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const auto thread = static_cast<int32_t>(threadIdx.x), slice = static_cast<int32_t>(blockIdx.x);
  const auto count = static_cast<int32_t>(args.count);
  const ScatterBits bits(route_shared, count);
  const bool lists = slice == args.slices;
  const int64_t assignment = int64_t{slice} * kRouteSlice + thread;
  uint32_t bad = 0;
  // beyond all assignments in the CTA that lists tiles
  const int expert = local_expert(args, assignment, args.assignments, bad);
  for (int32_t i = thread; i < ScatterBits::kSegments * count; i += kRouteSlice)
    bits.masks[i] = uint4{};
  for (int32_t e = thread; e < count; e += kRouteSlice) bits.totals[e] = bits.starts[e] = 0;
  __syncthreads();
  add_counts(args, slice_counts, slice, bits);
  if (expert >= 0) set_bit(bits.masks, count, thread, expert);
  __syncthreads();
  if (lists) {
    scan(
        args, args.slice_bad_ids, bits.keys, [&](int64_t e) { return bits.totals[e]; },
        [](int64_t, int32_t) {});
    return;
  }
  int32_t before = 0;
  for (int32_t first = 0; first < count; first += kRouteSlice) {
    const int32_t e = first + thread;
    Totals own, total;
    if (e < count) own.rows = bits.totals[e];
    int32_t row = before + cta_exclusive(own, warp_totals, total).rows;
    before += total.rows;
    if (e >= count) continue;
    row += bits.starts[e];
#pragma unroll
    for (int32_t segment = 0; segment < ScatterBits::kSegments; ++segment) {
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

// For any number of slices and experts: counts become first rows, and each warp scatters its part
// of a slice.
__global__ void route_scan(RouteArgs args, int32_t* slice_counts) {
  ptx::launch_dependents();
  ptx::grid_dependency_wait();
  extern __shared__ TileKey keys[];  // (E), if tiles are sorted
  scan_counts(args, slice_counts, args.slice_bad_ids, keys);
}
__global__ void route_scatter(RouteArgs args, int32_t* slice_counts) {
  extern __shared__ int32_t counts[];  // (warps, E)
  ptx::launch_dependents();
  ptx::grid_dependency_wait();
  const auto parts = static_cast<int32_t>(blockDim.x / 32),
             own = static_cast<int32_t>(threadIdx.x / 32);
  args.slice /= parts;
  const int64_t part = int64_t{blockIdx.x} * parts + own;
  count_slice(args, part, counts + own * args.count);
  __syncthreads();
  for (int64_t e = threadIdx.x; e < args.count; e += blockDim.x) {
    int32_t row = slice_counts[blockIdx.x * args.count + e];
    for (int32_t p = 0; p < parts; ++p) {
      const int32_t rows = counts[p * args.count + e];
      counts[p * args.count + e] = row;
      row += rows;
    }
  }
  __syncthreads();
  scatter_slice(args, part, counts + own * args.count);
}

}  // namespace

Status route(const StepContext& step, int32_t* cleared) {
  const RoutePlan& plan = step.plan->route;
  const RouteArgs args = route_args(step, cleared);
  if (plan.kernel == RouteKernel::kOneCta)
    return launch<route_one_cta>("route", 1, plan.threads, plan.shared_bytes, step.stream, args);
  int32_t* const slice_counts = Scratch(step).slice_counts;
  const auto slices = static_cast<unsigned>(args.slices);
  const int64_t counter_bytes = args.count * static_cast<int64_t>(sizeof(int32_t));
  NVFP4_MOE_TRY(launch<route_count>("route_count", slices, kRouteSlice, counter_bytes, step.stream,
                                    args, slice_counts));
  if (plan.kernel == RouteKernel::kScatterByBits)
    return launch<route_scatter_by_bits>("route_scatter_by_bits", slices + 1, plan.threads,
                                         plan.shared_bytes, step.stream, args, slice_counts);
  const int64_t key_bytes = plan.sorts_tiles() ? args.count * kTileKeyBytes : 0;
  NVFP4_MOE_TRY(
      launch<route_scan>("route_scan", 1, 1024, key_bytes, step.stream, args, slice_counts));
  return launch<route_scatter>("route_scatter", slices, plan.slice_parts * 32, plan.shared_bytes,
                               step.stream, args, slice_counts);
}

}  // namespace nvfp4_moe::internal::cuda
