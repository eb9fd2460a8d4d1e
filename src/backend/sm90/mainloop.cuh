// The consumers' mainloop: reads packed weight rows from a stage into registers, dequantizes them
// to fragments, and multiplies them with the stage's rows of activations by wgmma. Each warpgroup
// has a share of the weight rows and waits for its own products; the other warpgroups use that
// time. With only two warpgroups, fragments are made ahead instead.
#pragma once

#include <cstdint>

#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/sm90/dequantize.cuh"
#include "backend/sm90/shared.cuh"

namespace nvfp4_moe::internal::sm90 {

// One arrival for the whole warp if the predicate holds, after all its lanes.
__device__ inline void arrive_as_warp(uint32_t mbarrier, bool predicate) {
  __syncwarp();
  ptx::mbarrier_arrive_if(mbarrier, predicate && threadIdx.x % 32 < kArrivalsPerWarp);
}
template <class Traits>
__device__ void release_stage(int stage, bool predicate) {
  arrive_as_warp(empty_barrier<Traits>(stage), predicate);
}

// A consumer warpgroup's pipeline state, and the weights that it has read ahead.
template <class Traits>
struct ConsumerState {
  using Pipeline = PipelineState<Shared<Traits>::kStages>;
  using Products = typename Traits::Products;
  static constexpr int kFragmentWords = Traits::kStepsPerGroup * Traits::kM64 * 4;
  Pipeline pipeline;
  typename Products::Constants constants;
  typename Products::Weights weights[Traits::kM64];  // for 64 k
  uint32_t fragments[Traits::kAhead ? 2 : 1]
                    [kFragmentWords];  // of the current commit group, and of the next one

  // The fragments of commit group `group` of a k-block.
  __device__ uint32_t (&fragments_of(int group))[kFragmentWords] {
    return fragments[Traits::kAhead ? group % 2 : 0];
  }
  __device__ void read(int stage, int half) {
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    const uint8_t* const tiles = stage_bytes<Traits>(stage) + kWeightsOffset<Traits>;
#pragma unroll
    for (int m = 0; m < Traits::kM64; ++m) {
      const int m64 = warp / 4 * Traits::kM64 + m, group = m64 % 2 * 4 + warp % 4;
      Products::read(weights[m], tiles + m64 / 2 * cuda::kTileBytes, group, half, lane);
    }
  }
  __device__ void look_up() {
#pragma unroll
    for (auto& of_m64 : weights)
      Products::template look_up<Magnitudes::kCopies>(
          of_m64, magnitudes<Traits>(threadIdx.x % Magnitudes::kCopies));
  }
  // Reads a work tile's first weights and fragments. No work tile reads for the next one: fragments
  // that stay live between wgmmas of different N leave ptxas too few registers.
  __device__ void begin() {
    read_stage(pipeline);
    look_up();
    dequantize_group<0>(fragments_of(0));
  }
  // Waits for the stage, then reads from it. cp.async writes through the generic proxy, and wgmma
  // reads through the asynchronous one.
  __device__ void read_stage(Pipeline from) {
    ptx::mbarrier_wait(full_barrier<Traits>(from.stage), from.parity);
    if constexpr (!Traits::kTmaRows) ptx::fence_proxy_async_shared();
    read(from.stage, 0);
  }
  // Reads the second half of this k-block after half 0, and the next k-block's first half after
  // half 1. A work tile's last k-block is read again instead; nothing uses that.
  __device__ void read_on(int half, const Pipeline& next, bool more) {
    if (half == 0)
      read(pipeline.stage, 1);
    else
      read_stage(more ? next : Pipeline(pipeline));
  }
  // Dequantizes the kGroup-th commit group of the 64 k that were read last.
  template <int kGroup>
  __device__ void dequantize_group(uint32_t (&to)[kFragmentWords]) {
#pragma unroll
    for (int i = 0; i < Traits::kStepsPerGroup; ++i)
#pragma unroll
      for (int m = 0; m < Traits::kM64; ++m)
        Products::dequantize(weights[m], kGroup * Traits::kStepsPerGroup + i, constants,
                             to + (i * Traits::kM64 + m) * 4);
  }
};

// Accumulators of all rows of a tile in wgmma's layout; a narrower wgmma uses the first ones.
template <class Traits>
using Accumulators = float[Traits::kM64][Traits::kTileN / 2];

// accumulators += this warpgroup's weight rows times kN rows of activations, over a work tile's
// k-blocks.
//
// Nothing between a wgmma and its wait may branch: ptxas would serialize them.
template <class Traits, int kN>
__device__ void multiply(int32_t k_blocks, ConsumerState<Traits>& state,
                         Accumulators<Traits>& accumulators) {
  using Products = typename Traits::Products;
  constexpr int kGroups = Products::kSteps / Traits::kStepsPerGroup;  // per 64 k
  static_assert(kGroups <= 2);
  constexpr bool kReadFirst = Traits::kTileN <= 16;
  state.begin();
  int previous = 0;
#pragma unroll 1
  for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
    uint64_t rows =
        ptx::wgmma_descriptor_128b(ptx::shared_address(stage_bytes<Traits>(state.pipeline.stage)));
    // otherwise ptxas or's offsets into its halves, three instructions instead of one
    rows = ptx::pinned(rows);
    const auto next = state.pipeline.next();
    const bool more = k_block + 1 < k_blocks;
#pragma unroll
    for (int g = 0; g < 2 * kGroups; ++g) {
      const int half = g / kGroups;
      // this half is dequantized: read the next one
      const bool ends_half = g % kGroups == kGroups - 1;
      // A narrow wgmma leaves no time to read after it.
      if (kReadFirst && ends_half) state.read_on(half, next, more);
      auto& fragments = state.fragments_of(g);
      ptx::pin(fragments);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < Traits::kStepsPerGroup; ++i)
#pragma unroll
        for (int m = 0; m < Traits::kM64; ++m) {
          const int step = g * Traits::kStepsPerGroup + i;
          Products::multiply(reinterpret_cast<float(&)[kN / 2]>(accumulators[m]),
                             fragments + (i * Traits::kM64 + m) * 4,
                             rows + step / Traits::kStepsOfSlice * (Traits::kSliceBytes / 16) +
                                 step % Traits::kStepsOfSlice * 2);
        }
      ptx::wgmma_commit_group();
      if (!kReadFirst && ends_half) state.read_on(half, next, more);
      if (ends_half) state.look_up();
      auto& next_fragments = state.fragments_of(g + 1);
      const auto dequantize = [&] {
        if (ends_half)
          state.template dequantize_group<0>(next_fragments);
        else
          state.template dequantize_group<1>(next_fragments);
      };
      if constexpr (Traits::kAhead) {
        dequantize();
        ptx::pin(next_fragments);
      }
      ptx::wgmma_wait_group<0>();  // the fragments are free
      if (g == 0) release_stage<Traits>(previous, k_block > 0);
      if constexpr (!Traits::kAhead) dequantize();
    }
    previous = state.pipeline.stage;
    state.pipeline = next;
  }
  ptx::wgmma_wait_group<0>();
#pragma unroll
  for (auto& m64 : accumulators) ptx::pin(reinterpret_cast<float(&)[kN / 2]>(m64));
  release_stage<Traits>(previous, true);
}

// Multiplies with the narrowest wgmma that holds the work tile's rows.
template <class Traits, int kN>
__device__ void multiply_narrowest(const WorkTileInfo& work, ConsumerState<Traits>& state,
                                   Accumulators<Traits>& accumulators) {
  constexpr int kNarrower = kN - Traits::kConfig.n_step;
  if constexpr (kNarrower >= Traits::kConfig.min_n)
    if (work.rows.count <= kNarrower)
      return multiply_narrowest<Traits, kNarrower>(work, state, accumulators);
  multiply<Traits, kN>(work.k_blocks, state, accumulators);
}

}  // namespace nvfp4_moe::internal::sm90
