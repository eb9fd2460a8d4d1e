// Split-K: partials of tiles that are split along K, the counters at which their splits arrive, and
// the reduction by the cta that arrives last.
//
// A partial is fp32 accumulators in memory. Splits are added in the order of K, no matter which cta
// reduces them, so that the same launch gives the same bits.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/atomic.cuh"
#include "backend/cuda/ptx/named_barrier.cuh"
#include "backend/sm90/epilogue.cuh"
#include "backend/sm90/shared.cuh"

namespace nvfp4_moe::internal::sm90 {

// The address in a partial of four accumulators of a consumer thread: those of the eight rows
// `octet` in wgmma m. Coalesced over the threads.
template <class Traits>
__device__ float4* partial_address(const GemmArgs& args, int32_t partial, int m, int octet,
                                   int thread) {
  return reinterpret_cast<float4*>(args.partials) + partial * Traits::kPartialFloat4s +
         (m * (Traits::kTileN / 8) + octet) * Traits::kConsumerThreads + thread;
}

// Stores a thread's accumulators of wgmma m to a partial, for the rows that the work tile has.
template <class Traits>
__device__ void store_partial(const GemmArgs& args, const WorkTileInfo& work, int m,
                              const float (&accumulators)[Traits::kTileN / 2], int thread) {
#pragma unroll
  for (int octet = 0; octet < Traits::kTileN / 8; ++octet)
    if (octet * 8 + thread % 4 * 2 < work.rows.count)
      *partial_address<Traits>(args, work.partial, m, octet, thread) =
          make_float4(accumulators[octet * 4], accumulators[octet * 4 + 1],
                      accumulators[octet * 4 + 2], accumulators[octet * 4 + 3]);
}

// Adds the splits of a tile and passes the result to the epilogue. Called by all consumer threads.
// index: this cta's work tile of that tile. The four lanes of a weight row divide its rows of
// activations (possibly only one) and its wgmmas, in one short loop: a cta that gets here is the
// first on its multiprocessor, and must wait for every instruction to be fetched.
template <class Traits, class Epilogue>
__device__ void reduce_narrow_tile(const GemmArgs& args, const Epilogue& epilogue,
                                   const TileSplits& splits, uint32_t index) {
  constexpr int kAtOnce = 8;  // splits that are read at once
  const WorkTileInfo& own = work_tile_info<Traits>(index);
  const RowFactor* const factors = row_factors<Traits>(index);
  const int lane = static_cast<int>(threadIdx.x % 4),
            first_thread = static_cast<int>(threadIdx.x) - lane;
  const TileRows rows = own.rows;
  const int pairs = (rows.count + 1) / 2;  // of rows
#pragma unroll 1
  for (int item = lane; item < pairs * Traits::kM64; item += 4) {
    const int m = item % Traits::kM64, pair = item / Traits::kM64;
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int32_t first = 0; first < splits.count; first += kAtOnce) {
      float4 parts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < splits.count)
          parts[i] = __ldcg(partial_address<Traits>(args, splits.partial(first + i), m, pair / 4,
                                                    first_thread + pair % 4));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < splits.count)
          total.x += parts[i].x, total.y += parts[i].y, total.z += parts[i].z,
              total.w += parts[i].w;
    }
    const int32_t weight_row = own.weight_row + weight_row_of<Traits>(first_thread, m);
    const LaneBiases bias = epilogue.biases(rows.expert, weight_row);
#pragma unroll 1
    for (int row = pair * 2; row < min(pair * 2 + 2, rows.count); ++row) {
      const bool first = row % 2 == 0;
      epilogue.store(rows.first + row, weight_row, first ? total.x : total.y,
                     first ? total.z : total.w, factors[row], bias);
    }
  }
}

// The same for a wide tile, by when the instructions have been fetched. A thread reduces its own
// accumulators of 32 rows at a time, so that many reads are in flight.
template <class Traits, class Epilogue>
__device__ void reduce_wide_tile(const GemmArgs& args, const Epilogue& epilogue,
                                 const TileSplits& splits, uint32_t index) {
  constexpr int kOctets = 4;  // groups of eight rows
  const WorkTileInfo own = work_tile_info<Traits>(index);
  const RowFactor* const factors = row_factors<Traits>(index);
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int first_octet = 0; first_octet * 8 < own.rows.count; first_octet += kOctets) {
    float accumulators[kOctets][Traits::kM64][4] = {};
#pragma unroll 1
    for (int32_t split = 0; split < splits.count; ++split) {
      float4 parts[kOctets][Traits::kM64];
#pragma unroll
      for (int q = 0; q < kOctets; ++q)
#pragma unroll
        for (int m = 0; m < Traits::kM64; ++m)
          if ((first_octet + q) * 8 + thread % 4 * 2 < own.rows.count)
            parts[q][m] = __ldcg(
                partial_address<Traits>(args, splits.partial(split), m, first_octet + q, thread));
#pragma unroll
      for (int q = 0; q < kOctets; ++q)
#pragma unroll
        for (int m = 0; m < Traits::kM64; ++m) {
          accumulators[q][m][0] += parts[q][m].x, accumulators[q][m][1] += parts[q][m].y;
          accumulators[q][m][2] += parts[q][m].z, accumulators[q][m][3] += parts[q][m].w;
        }
    }
#pragma unroll
    for (int q = 0; q < kOctets; ++q) {
      TileRows octet = own.rows;
      octet.first += (first_octet + q) * 8;
      octet.count -= (first_octet + q) * 8;
#pragma unroll
      for (int m = 0; m < Traits::kM64; ++m)
        store_direct<8>(epilogue, octet, own.weight_row + weight_row_of<Traits>(thread, m),
                        accumulators[q][m],
                        [&](int row) { return factors[(first_octet + q) * 8 + row]; });
    }
  }
}

// Runs after a cta's last work tile. The cta arrives at the one or two split tiles of which it has
// a split, and reduces those at which it arrives last. Called by all consumer threads. index: the
// last work tile; the info of the one before is still valid.
template <class Traits, class Epilogue>
__device__ void reduce_split_tiles(const GemmArgs& args, const Epilogue& epilogue,
                                   const Schedule& schedule, uint32_t index) {
  const int32_t begin = schedule.split_begin(static_cast<int32_t>(blockIdx.x)),
                end = schedule.split_begin(static_cast<int32_t>(blockIdx.x) + 1);
  if (begin == end) return;
  const int32_t last_tile = schedule.params.by_k_blocks(end - 1),
                tiles = last_tile - schedule.params.by_k_blocks(begin) + 1;
  ptx::named_barrier_sync<Traits::kConsumerThreads>(2);  // all partials are stored
  if (static_cast<int32_t>(threadIdx.x) < tiles) {
    const auto i = static_cast<int32_t>(threadIdx.x);
    int32_t* const counter = args.arrivals + last_tile - i;
    TileSplits splits = schedule.splits_of(last_tile - i);
    if (splits.count == 1 || ptx::atomic_increment_acq_rel(counter) != splits.count - 1)
      splits.count = 0;
    else
      *counter = 0;
    shared<Traits>().work.to_reduce[i] = splits;
  }
  ptx::named_barrier_sync<Traits::kConsumerThreads>(2);
#pragma unroll 1
  for (int32_t i = tiles - 1; i >= 0; --i) {
    const TileSplits splits = shared<Traits>().work.to_reduce[i];
    if (splits.count == 0) continue;
    if constexpr (Traits::kWide)
      reduce_wide_tile<Traits>(args, epilogue, splits, index - static_cast<uint32_t>(i));
    else
      reduce_narrow_tile<Traits>(args, epilogue, splits, index - static_cast<uint32_t>(i));
  }
}

}  // namespace nvfp4_moe::internal::sm90
