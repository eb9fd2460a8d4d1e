// route's kernels and their launches.
#include <algorithm>

#include "backend/cuda/launch.cuh"
#include "backend/cuda/route.cuh"
#include "backend/cuda/steps.h"

namespace nvfp4_moe::cuda {
namespace {

__global__ void route_one_block(RouteArgs args) {
  extern __shared__ int32_t counts[];  // (chunks, E)
  let_next_start();
  wait_for_previous();
  route_by_one_block(args, counts);
}

// One warp a block.
__global__ void route_count(RouteArgs args, int32_t* chunk_counts) {
  extern __shared__ int32_t counts[];  // (E)
  let_next_start();
  wait_for_previous();
  const unsigned bad_ids = count_chunk(args, blockIdx.x, counts);
  if (threadIdx.x == 0) args.chunk_bad_ids[blockIdx.x] = bad_ids;
  __syncwarp();
  for (int64_t e = threadIdx.x; e < args.count; e += 32) chunk_counts[blockIdx.x * args.count + e] = counts[e];
}
__global__ void route_scan(RouteArgs args, int32_t* chunk_counts) {
  let_next_start();
  wait_for_previous();
  scan(args, chunk_counts, args.chunk_bad_ids);
}
__global__ void route_place(RouteArgs args, int32_t* chunk_counts) {
  extern __shared__ int32_t counts[];  // (E)
  let_next_start();
  wait_for_previous();
  for (int64_t e = threadIdx.x; e < args.count; e += 32) counts[e] = chunk_counts[blockIdx.x * args.count + e];
  __syncwarp();
  place_chunk(args, blockIdx.x, counts);
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
  const size_t counter_bytes = static_cast<size_t>(args.count) * sizeof(int32_t);
  const auto chunks = static_cast<unsigned>(args.chunks);
  launch<route_count>(chunks, 32, counter_bytes, call.stream, args, chunk_counts);
  launch<route_scan>(1, 1024, 0, call.stream, args, chunk_counts);
  launch<route_place>(chunks, 32, counter_bytes, call.stream, args, chunk_counts);
}

Tiling tiling(const HostCall& call) { return {tile_rows(call.weights.config, call.batch.tokens), false, nullptr, 0}; }
void route(const HostCall& call) { route_in_tiles(call, tiling(call)); }

}  // namespace nvfp4_moe::cuda
