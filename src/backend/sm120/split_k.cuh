// Split-K: partials of tiles that are split along K, the counters at which their splits arrive, and the reduction by the
// cta that arrives last.
//
// A partial is fp32 accumulators in memory. Splits are added in the order of K, whichever cta does it, so that the same
// launch gives the same bits.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/atomic.cuh"
#include "backend/cuda/ptx/named_barrier.cuh"
#include "backend/sm120/epilogue.cuh"

namespace nvfp4_moe::sm120 {

// Where a partial has four accumulators of a consumer thread: coalesced over the threads.
template <class Traits>
__device__ float4* partial_address(const GemmArgs& args, int32_t partial, int m, int n) {
  return reinterpret_cast<float4*>(args.partials) + partial * Traits::kPartialFloat4s +
         (m * Traits::kWarpOctets + n) * Traits::kConsumerThreads + threadIdx.x;
}

// A thread's accumulators to a partial, as far as the work tile has rows.
template <class Traits>
__device__ void store_partial(const GemmArgs& args, int32_t partial, int count,
                              const Accumulators<Traits>& accumulators) {
#pragma unroll
  for (int m = 0; m < Traits::kWarpGroups; ++m)
#pragma unroll
    for (int n = 0; n < Traits::kWarpOctets; ++n) {
      if ((first_octet<Traits>() + n) * 8 >= count) break;
      const float(&of)[4] = accumulators[m][n];
      *partial_address<Traits>(args, partial, m, n) = make_float4(of[0], of[1], of[2], of[3]);
    }
}

// The splits of a tile, added, to the epilogue: each thread those accumulators that would be its own.
template <class Traits, class Epilogue>
__device__ void reduce_tile(const GemmArgs& args, const Epilogue& epilogue, const cuda::TileSplits& splits,
                            const cuda::TileRows& rows, const RowFactor* factors, int32_t m_tile) {
#pragma unroll 1
  for (int m = 0; m < Traits::kWarpGroups; ++m)
#pragma unroll 1
    for (int n = 0; n < Traits::kWarpOctets; ++n) {
      if ((first_octet<Traits>() + n) * 8 >= rows.count) break;
      float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int32_t split = 0; split < splits.count; ++split) {
        const float4 part = __ldcg(partial_address<Traits>(args, splits.partial(split), m, n));
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      }
      const float of[4] = {total.x, total.y, total.z, total.w};
      store_fragment(epilogue, rows, factors, m_tile, first_group<Traits>() + m, first_octet<Traits>() + n, of);
    }
}

// After a cta's last work tile: it arrives at the split tiles that it has a split of, one or two, and reduces those at
// which it is the last. All consumer threads. index: of the last work tile, m_tiles[i]: the tile of weight rows of the one
// i before it; rows and factors of both are still there.
template <class Traits, class Epilogue>
__device__ void reduce_split_tiles(const GemmArgs& args, const Epilogue& epilogue, uint32_t index,
                                   const int32_t (&m_tiles)[2]) {
  auto& shared = sm120::shared<Traits>();
  const cuda::Schedule& schedule = shared.schedule;
  const int32_t begin = schedule.split_begin(static_cast<int32_t>(blockIdx.x)),
                end = schedule.split_begin(static_cast<int32_t>(blockIdx.x) + 1);
  if (begin == end) return;
  const int32_t last_tile = schedule.params.by_k_blocks(end - 1),
                tiles = last_tile - schedule.params.by_k_blocks(begin) + 1;
  ptx::named_barrier_sync<Traits::kConsumerThreads>(1);  // all partials are stored
  if (static_cast<int32_t>(threadIdx.x) < tiles) {
    const auto i = static_cast<int32_t>(threadIdx.x);
    int32_t* const counter = args.arrivals + last_tile - i;
    cuda::TileSplits splits = schedule.splits_of(last_tile - i);
    if (splits.count == 1 || ptx::atomic_increment_acq_rel(counter) != splits.count - 1)
      splits.count = 0;
    else
      *counter = 0;
    shared.to_reduce[i] = splits;
  }
  ptx::named_barrier_sync<Traits::kConsumerThreads>(1);
#pragma unroll
  for (int i = 1; i >= 0; --i) {
    if (i >= tiles) continue;
    const cuda::TileSplits splits = shared.to_reduce[i];
    const uint32_t turn = (index - static_cast<uint32_t>(i)) % 2;
    if (splits.count != 0)
      reduce_tile<Traits>(args, epilogue, splits, shared.rows[turn], shared.factors[turn], m_tiles[i]);
  }
}

}  // namespace nvfp4_moe::sm120
