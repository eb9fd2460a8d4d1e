// The consumers' mainloop: packed weight rows from a stage into registers, dequantized to bf16 fragments, times the
// stage's rows of activations by wgmma. Each of the four warpgroups has a share of the weight rows and waits for its own
// products; the others fill the time.
#pragma once

#include <cstdint>

#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/sm90/dequantize.cuh"
#include "backend/sm90/shared.cuh"

namespace nvfp4_moe::sm90 {

// One arrival for the whole warp where the predicate holds, once all its lanes are there.
__device__ inline void arrive_as_warp(uint32_t mbarrier, bool predicate) {
  __syncwarp();
  ptx::mbarrier_arrive_if(mbarrier, predicate && threadIdx.x % 32 < kArrivalsPerWarp);
}
template <class Traits>
__device__ void release_stage(int stage, bool predicate) {
  arrive_as_warp(empty_barrier<Traits>(stage), predicate);
}

// A consumer warpgroup's stage, and the weights that it has read ahead.
template <class Traits>
struct ConsumerState {
  using Pipeline = PipelineState<Shared<Traits>::kStages>;
  Pipeline pipeline;
  uint32_t scale_base = kScaleBase;
  uint4 codes[Traits::kM64];                                      // of 64 k, a k16 step a word
  uint2 scales[Traits::kM64];                                     // of the same
  uint32_t fragments[Traits::kStepsPerGroup * Traits::kM64 * 4];  // of one commit group

  __device__ void read(int stage, int half) {
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    const uint8_t* const weights = stage_bytes<Traits>(stage) + kWeightsOffset<Traits>;
#pragma unroll
    for (int m = 0; m < Traits::kM64; ++m) {
      const int m64 = warp / 4 * Traits::kM64 + m, group = m64 % 2 * 4 + warp % 4;
      const uint8_t* const tile = weights + m64 / 2 * cuda::kTileBytes;
      codes[m] = *reinterpret_cast<const uint4*>(tile + cuda::lane_offset(group, half, lane));
      scales[m] = *reinterpret_cast<const uint2*>(tile + cuda::scale_offset(group, half, lane / 4));
    }
  }
  // A work tile's first codes and fragments. No work tile reads for the next one: fragments that live from a wgmma of
  // one N to one of another leave ptxas too few registers.
  __device__ void begin() {
    read_stage(pipeline);
    dequantize_group<0>();
  }
  // Once the stage is there. cp.async writes through the generic proxy, and wgmma reads through the asynchronous one.
  __device__ void read_stage(Pipeline from) {
    ptx::mbarrier_wait(full_barrier<Traits>(from.stage), from.parity);
    if constexpr (!Traits::kTmaRows) ptx::fence_proxy_async_shared();
    read(from.stage, 0);
  }
  // The other half of this k-block after half 0, the next k-block's first after half 1. A work tile's last k-block reads
  // itself again; nothing uses that.
  __device__ void read_on(int half, const Pipeline& next, bool more) {
    if (half == 0)
      read(pipeline.stage, 1);
    else
      read_stage(more ? next : Pipeline(pipeline));
  }
  // The kGroup-th commit group of the 64 k that were read last.
  template <int kGroup>
  __device__ void dequantize_group() {
#pragma unroll
    for (int i = 0; i < Traits::kStepsPerGroup; ++i)
#pragma unroll
      for (int m = 0; m < Traits::kM64; ++m) {
        constexpr int kFirst = kGroup * Traits::kStepsPerGroup;
        const uint32_t words[4] = {codes[m].x, codes[m].y, codes[m].z, codes[m].w};
        const int step = kFirst + i;
        const uint32_t scale_word = step / 2 == 0 ? scales[m].x : scales[m].y;
        uint32_t* const fragment = fragments + (i * Traits::kM64 + m) * 4;
        if (step % 2 == 0)
          dequantize<false>(words[step], scale_word, scale_base, fragment);
        else
          dequantize<true>(words[step], scale_word, scale_base, fragment);
      }
  }
};

// Accumulators of all rows of a tile as wgmma leaves them; those of a narrower wgmma are the first.
template <class Traits>
using Accumulators = float[Traits::kM64][Traits::kTileN / 2];

// accumulators += this warpgroup's weight rows times kN rows of activations, over a work tile's k-blocks.
//
// Nothing between a wgmma and its wait branches: ptxas would serialize them.
template <class Traits, int kN>
__device__ void multiply(int32_t k_blocks, ConsumerState<Traits>& state, Accumulators<Traits>& accumulators) {
  constexpr int kGroups = 4 / Traits::kStepsPerGroup;  // of 64 k
  static_assert(kGroups <= 2);
  constexpr bool kReadFirst = Traits::kTileN <= 16;
  state.begin();
  int previous = 0;
#pragma unroll 1
  for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
    uint64_t rows = ptx::wgmma_descriptor_128b(ptx::shared_address(stage_bytes<Traits>(state.pipeline.stage)));
    rows = ptx::pinned(rows);  // else offsets into it are or'ed by halves, three instructions for one
    const auto next = state.pipeline.next();
    const bool more = k_block + 1 < k_blocks;
#pragma unroll
    for (int g = 0; g < 2 * kGroups; ++g) {
      const int half = g / kGroups, of_half = g % kGroups;
      // This half is dequantized with its last group: read on. A narrow wgmma leaves no time for that after it.
      if (kReadFirst && of_half == kGroups - 1) state.read_on(half, next, more);
      ptx::pin(state.fragments);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < Traits::kStepsPerGroup; ++i)
#pragma unroll
        for (int m = 0; m < Traits::kM64; ++m)
          ptx::wgmma(reinterpret_cast<float(&)[kN / 2]>(accumulators[m]), state.fragments + (i * Traits::kM64 + m) * 4,
                     rows + half * (Traits::kRowsOf64KBytes / 16) + 2 * (of_half * Traits::kStepsPerGroup + i));
      ptx::wgmma_commit_group();
      if (!kReadFirst && of_half == kGroups - 1) state.read_on(half, next, more);
      ptx::wgmma_wait_group<0>();  // the fragments are free
      if (g == 0) release_stage<Traits>(previous, k_block > 0);
      if (of_half == kGroups - 1)
        state.template dequantize_group<0>();
      else
        state.template dequantize_group<1>();
    }
    previous = state.pipeline.stage;
    state.pipeline = next;
  }
  ptx::wgmma_wait_group<0>();
#pragma unroll
  for (auto& m64 : accumulators) ptx::pin(reinterpret_cast<float(&)[kN / 2]>(m64));
  release_stage<Traits>(previous, true);
}

// With the narrowest wgmma that holds the work tile's rows.
template <class Traits, int kN>
__device__ void multiply_narrowest(const WorkTileInfo& work, ConsumerState<Traits>& state,
                                   Accumulators<Traits>& accumulators) {
  constexpr int kNarrower = kN - Traits::kConfig.n_step;
  if constexpr (kNarrower >= Traits::kConfig.min_n)
    if (work.rows.count <= kNarrower) return multiply_narrowest<Traits, kNarrower>(work, state, accumulators);
  multiply<Traits, kN>(work.k_blocks, state, accumulators);
}

}  // namespace nvfp4_moe::sm90
