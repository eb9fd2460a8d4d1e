// route's kernels and their launches.
#include <algorithm>

#include "backend/cuda/launch.cuh"
#include "backend/cuda/route.cuh"
#include "backend/cuda/steps.h"

namespace nvfp4_moe::cuda {
namespace {

__global__ void __launch_bounds__(OneBlock::kManyThreads) route_one_block(RouteArgs args) {
  extern __shared__ uint4 route_shared[];
  let_next_start();
  wait_for_previous();
  route_by_one_block(args, route_shared);
}

// Warps of a block that counts or places a chunk.
constexpr int64_t kMostParts = 8;

// The chunk of a block in parts, one of each warp. counts (warps, E): rows of each expert in a part. Returns the bad
// ids of the own part. Ends with the block in step.
__device__ unsigned count_parts(RouteArgs& args, int32_t* counts) {
  const auto parts = static_cast<int32_t>(blockDim.x / 32), own = static_cast<int32_t>(threadIdx.x / 32);
  args.chunk /= parts;
  const unsigned bad_ids = count_chunk(args, int64_t{blockIdx.x} * parts + own, counts + own * args.count);
  __syncthreads();
  return bad_ids;
}

__global__ void route_count(RouteArgs args, int32_t* chunk_counts) {
  extern __shared__ int32_t counts[];  // (warps, E)
  let_next_start();
  wait_for_previous();
  const auto parts = static_cast<int32_t>(blockDim.x / 32);
  const unsigned own_bad_ids = count_parts(args, counts);
  for (int64_t e = threadIdx.x; e < args.count; e += blockDim.x) {
    int32_t rows = 0;
    for (int32_t part = 0; part < parts; ++part) rows += counts[part * args.count + e];
    chunk_counts[blockIdx.x * args.count + e] = rows;
  }
  __syncthreads();  // the counters are free: many experts leave room for nothing else
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = static_cast<int32_t>(own_bad_ids);
  __syncthreads();
  if (threadIdx.x != 0) return;
  int32_t bad_ids = 0;
  for (int32_t part = 0; part < parts; ++part) bad_ids += counts[part];
  args.chunk_bad_ids[blockIdx.x] = static_cast<uint32_t>(bad_ids);
}
__global__ void route_scan(RouteArgs args, int32_t* chunk_counts) {
  let_next_start();
  wait_for_previous();
  extern __shared__ TileKey keys[];  // (E), under widest_first
  scan_counts(args, chunk_counts, args.chunk_bad_ids, keys);
}
__global__ void route_place(RouteArgs args, int32_t* chunk_counts) {
  extern __shared__ int32_t counts[];  // (warps, E)
  let_next_start();
  wait_for_previous();
  const auto parts = static_cast<int32_t>(blockDim.x / 32), own = static_cast<int32_t>(threadIdx.x / 32);
  count_parts(args, counts);
  for (int64_t e = threadIdx.x; e < args.count; e += blockDim.x) {
    int32_t row = chunk_counts[blockIdx.x * args.count + e];
    for (int32_t part = 0; part < parts; ++part) {
      const int32_t rows = counts[part * args.count + e];
      counts[part * args.count + e] = row;
      row += rows;
    }
  }
  __syncthreads();
  place_chunk(args, int64_t{blockIdx.x} * parts + own, counts + own * args.count);
}

}  // namespace

void route_in_tiles(const HostCall& call, const Tiling& tiling) {
  RouteArgs args = route_args(call, tiling);
  if (args.choices <= kRouteOneBlock) {
    const OneBlock block(args);
    launch<route_one_block>(1, block.threads, block.shared_bytes, call.stream, args);
    return;
  }
  int32_t* const chunk_counts =
      Scratch(call.weights.config, call.weights.range, call.batch.tokens, call.scratch).chunk_counts;
  args.chunk = kRouteChunk;
  args.chunks = static_cast<int32_t>(ceil_div(args.choices, kRouteChunk));
  int64_t parts = kMostParts;  // a power of two, so that it divides a chunk
  while (parts > 1 && parts * args.count * static_cast<int64_t>(sizeof(int32_t)) > OneBlock::kCounterBytes) parts /= 2;
  const auto threads = static_cast<unsigned>(parts * 32), chunks = static_cast<unsigned>(args.chunks);
  const auto counter_bytes = static_cast<size_t>(parts * args.count) * sizeof(int32_t);
  launch<route_count>(chunks, threads, counter_bytes, call.stream, args, chunk_counts);
  const size_t key_bytes = args.widest_first ? static_cast<size_t>(args.count) * sizeof(TileKey) : 0;
  launch<route_scan>(1, 1024, key_bytes, call.stream, args, chunk_counts);
  launch<route_place>(chunks, threads, counter_bytes, call.stream, args, chunk_counts);
}

Tiling tiling(const HostCall& call) {
  return {tile_rows(call.weights.config, call.batch.tokens), false, nullptr, 0, false};
}
void route(const HostCall& call) { route_in_tiles(call, tiling(call)); }

}  // namespace nvfp4_moe::cuda
