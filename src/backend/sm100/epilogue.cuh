// The role of the epilogue's warps: moves a tile's accumulators from tensor memory to the output,
// or to a split-K partial.
//
// Read in the shape 16x256b, accumulators have the register layout of mma.sync: gate and up of a
// channel, weight rows r and r + 8, are in one lane.
#pragma once

#include <cstdint>

#include "backend/cuda/fp4/split_k.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/ptx/tcgen05.cuh"
#include "backend/sm100/shared.cuh"

namespace nvfp4_moe::internal::sm100 {

// Calls each(group, octet, four accumulators) for this warp's share of a tile with `count` rows,
// whose first column is `from`.
template <class Traits, class Each>
__device__ void for_each_fragment(uint32_t from, int count, const Each& each) {
  constexpr int kOctets = Traits::kWarpOctets < 4 ? 1 : 4;  // per load
  static_assert(Traits::kWarpOctets % kOctets == 0);
  const uint32_t lanes = threadIdx.x / 32 * 32 << 16;
#pragma unroll 1
  for (int octet = 0; octet * 8 < count; octet += kOctets) {
    uint32_t values[Traits::kWarpGroups][4 * kOctets];
#pragma unroll
    for (int group = 0; group < Traits::kWarpGroups; ++group)
      ptx::tcgen05_load_16x256b(values[group],
                                from + lanes + (group * cuda::kGroupRows << 16) + octet * 8);
    ptx::tcgen05_wait_load();
#pragma unroll
    for (int group = 0; group < Traits::kWarpGroups; ++group) {
      ptx::pin(values[group]);
#pragma unroll
      for (int i = 0; i < kOctets; ++i) {
        if ((octet + i) * 8 >= count) break;
        const uint32_t* const four = values[group] + 4 * i;
        const float of[4] = {__uint_as_float(four[0]), __uint_as_float(four[1]),
                             __uint_as_float(four[2]), __uint_as_float(four[3])};
        each(group, octet + i, of);
      }
    }
  }
}

template <class Traits, class Shared, class Epilogue>
__device__ void store_tiles(Shared& shared, const GemmArgs& args, const Epilogue& epilogue) {
  ptx::grid_dependency_wait();  // before anything is stored, and in every cta
  cuda::WorkTileIterator work_tiles(shared.schedule, static_cast<int32_t>(blockIdx.x));
  uint32_t index = 0;
  int32_t m_tiles[2] = {};  // of the last work tile, and of the one before
  for (cuda::WorkTile work; work_tiles.next(work); ++index) {
    m_tiles[1] = m_tiles[0];
    m_tiles[0] = work.tile.m_tile;
    const auto wait = [&](const uint64_t& barrier) {
      ptx::mbarrier_wait(ptx::shared_address(&barrier), turn_parity(index));
    };
    wait(shared.factors_full[index % 2]);  // it follows rows_full
    wait(shared.accumulators_full[index % 2]);
    ptx::tcgen05_fence_after_thread_sync();
    const cuda::TileRows rows = shared.rows[index % 2];
    const uint32_t accumulators = shared.tensor_memory + index % 2 * Traits::kAccumulatorColumns;
    if (work.partial < 0) {
      cuda::LaneBiases biases[Traits::kWarpGroups];
#pragma unroll
      for (int group = 0; group < Traits::kWarpGroups; ++group)
        biases[group] =
            lane_biases(epilogue, rows, work.tile.m_tile, Traits::first_group() + group);
      for_each_fragment<Traits>(
          accumulators, rows.count, [&](int group, int octet, const float(&of)[4]) {
            store_fragment(epilogue, rows, shared.factors[index % 2], work.tile.m_tile,
                           Traits::first_group() + group, octet, of, biases[group]);
          });
    } else {
      for_each_fragment<Traits>(
          accumulators, rows.count, [&](int group, int octet, const float(&of)[4]) {
            cuda::fp4::store_partial<Traits>(args, work.partial, group, octet, of);
          });
    }
    ptx::tcgen05_fence_before_thread_sync();
    arrive_as_warp(shared.work_empty[index % 2]);
  }
  if (index > 0) cuda::fp4::reduce_split_tiles<Traits>(shared, args, epilogue, index - 1, m_tiles);
}

}  // namespace nvfp4_moe::internal::sm100
