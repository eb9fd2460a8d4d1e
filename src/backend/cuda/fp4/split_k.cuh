// Split-K: partials of tiles that are split along K, the counters at which their splits arrive, and
// the reduction by the cta that arrives last.
//
// A partial is fp32 accumulators in memory. Splits are added in the order of K, no matter which cta
// reduces them, so that the same launch gives the same bits.
//
// Traits define the threads that have accumulators, the first kEpilogueThreads of a cta, and each
// warp's share of a tile: kWarpGroups groups of 16 weight rows from first_group() on, kWarpOctets
// octets of rows from first_octet() on.
#pragma once

#include <cstdint>

#include "backend/cuda/fp4/epilogue.cuh"
#include "backend/cuda/ptx/atomic.cuh"
#include "backend/cuda/ptx/named_barrier.cuh"

namespace nvfp4_moe::internal::cuda::fp4 {

// The address in a partial of four accumulators of a thread, for its group m and octet n. Coalesced
// over the threads.
template <class Traits>
__device__ float4* partial_address(const GemmArgs& args, int32_t partial, int m, int n) {
  constexpr int64_t kFloat4s = int64_t{kTileRows} * Traits::kTileN / 4;
  return reinterpret_cast<float4*>(args.partials) + partial * kFloat4s +
         (m * Traits::kWarpOctets + n) * Traits::kEpilogueThreads + threadIdx.x;
}

template <class Traits>
__device__ void store_partial(const GemmArgs& args, int32_t partial, int m, int n,
                              const float (&of)[4]) {
  *partial_address<Traits>(args, partial, m, n) = make_float4(of[0], of[1], of[2], of[3]);
}

// Adds the splits of a tile and passes the result to the epilogue. Each thread reduces the
// accumulators that it would hold itself.
template <class Traits, class Epilogue>
__device__ void reduce_tile(const GemmArgs& args, const Epilogue& epilogue,
                            const TileSplits& splits, const TileRows& rows,
                            const RowFactor* factors, int32_t m_tile) {
#pragma unroll 1
  for (int m = 0; m < Traits::kWarpGroups; ++m) {
    const LaneBiases biases = lane_biases(epilogue, rows, m_tile, Traits::first_group() + m);
#pragma unroll 1
    for (int n = 0; n < Traits::kWarpOctets; ++n) {
      if ((Traits::first_octet() + n) * 8 >= rows.count) break;
      float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int32_t split = 0; split < splits.count; ++split) {
        const float4 part = __ldcg(partial_address<Traits>(args, splits.partial(split), m, n));
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      }
      const float of[4] = {total.x, total.y, total.z, total.w};
      store_fragment(epilogue, rows, factors, m_tile, Traits::first_group() + m,
                     Traits::first_octet() + n, of, biases);
    }
  }
}

// Runs after a cta's last work tile. The cta arrives at the one or two split tiles of which it has
// a split, and reduces those at which it arrives last. Called by all kEpilogueThreads. index: the
// last work tile. m_tiles[i]: the tile of weight rows of the work tile i before it. shared: the
// cta's shared memory, in which rows and factors of both are still valid.
template <class Traits, class Shared, class Epilogue>
__device__ void reduce_split_tiles(Shared& shared, const GemmArgs& args, const Epilogue& epilogue,
                                   uint32_t index, const int32_t (&m_tiles)[2]) {
  const Schedule& schedule = shared.schedule;
  const int32_t begin = schedule.split_begin(static_cast<int32_t>(blockIdx.x)),
                end = schedule.split_begin(static_cast<int32_t>(blockIdx.x) + 1);
  if (begin == end) return;
  const int32_t last_tile = schedule.params.by_k_blocks(end - 1),
                tiles = last_tile - schedule.params.by_k_blocks(begin) + 1;
  ptx::named_barrier_sync<Traits::kEpilogueThreads>(1);  // all partials are stored
  if (static_cast<int32_t>(threadIdx.x) < tiles) {
    const auto i = static_cast<int32_t>(threadIdx.x);
    int32_t* const counter = args.arrivals + last_tile - i;
    TileSplits splits = schedule.splits_of(last_tile - i);
    if (splits.count == 1 || ptx::atomic_increment_acq_rel(counter) != splits.count - 1)
      splits.count = 0;
    else
      *counter = 0;
    shared.to_reduce[i] = splits;
  }
  ptx::named_barrier_sync<Traits::kEpilogueThreads>(1);
#pragma unroll
  for (int i = 1; i >= 0; --i) {
    if (i >= tiles) continue;
    const TileSplits splits = shared.to_reduce[i];
    const uint32_t turn = (index - static_cast<uint32_t>(i)) % 2;
    if (splits.count != 0)
      reduce_tile<Traits>(args, epilogue, splits, shared.rows[turn], shared.factors[turn],
                          m_tiles[i]);
  }
}

}  // namespace nvfp4_moe::internal::cuda::fp4
