// The consumers' mainloop: a stage's packed weight rows are A fragments and its rows of activations
// B fragments of mma.m16n8k64, both with their scales as stored. Nothing is converted.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/mma_block_scale.cuh"
#include "backend/sm120/shared.cuh"

namespace nvfp4_moe::internal::sm120 {

// A warp's accumulators: (groups of 16 weight rows, octets of rows of activations, d of mma_fp4).
template <class Traits>
using Accumulators = float[Traits::kWarpGroups][Traits::kWarpOctets][4];

// accumulators += 128 k of the stage. last_row: the tile's last row of activations. Octets beyond
// it are skipped; within an octet it replaces missing rows, so that only written memory is read.
template <class Traits>
__device__ void multiply_tile(const Stage<Traits>& stage, int tile, int last_row,
                              Accumulators<Traits>& accumulators) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint8_t* const weights = stage.weights[tile];
  uint4 a[cuda::kHalves][Traits::kWarpGroups];
  uint32_t scales_a[cuda::kHalves][Traits::kWarpGroups];
#pragma unroll
  for (int half = 0; half < cuda::kHalves; ++half)
#pragma unroll
    for (int m = 0; m < Traits::kWarpGroups; ++m) {
      const int group = Traits::first_group() + m;
      a[half][m] = *reinterpret_cast<const uint4*>(weights + cuda::lane_offset(group, half, lane));
      scales_a[half][m] = *reinterpret_cast<const uint32_t*>(
          weights + scale_word_offset(group, half, scale_row(lane)));
    }
#pragma unroll
  for (int n = 0; n < Traits::kWarpOctets; ++n) {
    const int first = (Traits::first_octet() + n) * 8;
    if (first > last_row) break;
    uint32_t b[4];  // k 0, 32, 64, 96 of eight rows
    const uint8_t* const row = stage.rows[min(first + lane % 8, last_row)];
    cuda::load_matrices(b, ptx::shared_address(row + tile * (cuda::kTileK / 2) + lane / 8 * 16));
    const auto scales_b =
        *reinterpret_cast<const uint2*>(stage.rows[min(first + lane / 4, last_row)] +
                                        cuda::kFp4KBlockScales + tile * (cuda::kTileK / 16));
#pragma unroll
    for (int m = 0; m < Traits::kWarpGroups; ++m) {
      ptx::mma_fp4(accumulators[m][n], a[0][m], b[0], b[1], scales_a[0][m], scales_b.x);
      ptx::mma_fp4(accumulators[m][n], a[1][m], b[2], b[3], scales_a[1][m], scales_b.y);
    }
  }
}

// accumulators = a work tile's products. The last k-block of K may have only one tile of weights.
template <class Traits>
__device__ void multiply(const GemmArgs& args, const cuda::WorkTile& work, int last_row,
                         PipelineState<Shared<Traits>::kStages>& state,
                         Accumulators<Traits>& accumulators) {
  auto& shared = sm120::shared<Traits>();
#pragma unroll
  for (auto& of_group : accumulators)
#pragma unroll
    for (auto& of_octet : of_group)
#pragma unroll
      for (float& value : of_octet) value = 0;
#pragma unroll 1
  for (int32_t k_block = 0; k_block < work.k_blocks; ++k_block, state.advance()) {
    const Stage<Traits>& stage = shared.stages[state.stage];
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[state.stage]), state.parity);
    multiply_tile<Traits>(stage, 0, last_row, accumulators);
    if ((work.first_k_block + k_block) * kBlockTiles + 1 < args.k_tiles)
      multiply_tile<Traits>(stage, 1, last_row, accumulators);
    arrive_as_warp(shared.empty[state.stage]);
  }
}

}  // namespace nvfp4_moe::internal::sm120
