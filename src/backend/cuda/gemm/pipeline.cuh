// The pipeline of a persistent GEMM's cta: how many stages its shared memory has room for, where a
// role stands in it, and how a warp arrives at its barriers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/address.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"

namespace nvfp4_moe::internal::cuda {

// SharedOf<Traits, stages>: the shared memory of a cta with that many. As many stages as fit into
// kBytes, kMost at most.
template <template <class, int> class SharedOf, class Traits, int kBytes, int kMost>
constexpr int fitting_stages() {
  if constexpr (sizeof(SharedOf<Traits, kMost>) <= kBytes)
    return kMost;
  else
    return fitting_stages<SharedOf, Traits, kBytes, kMost - 1>();
}

// A stage, and the parity of the pipeline's round through all of them.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;
  __device__ PipelineState next() const {
    return stage + 1 == kStages ? PipelineState{0, parity ^ 1} : PipelineState{stage + 1, parity};
  }
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// What belongs to work tiles stands twice, for them by turns. The parity of the turn in which work
// tile `index` has its half.
__device__ inline uint32_t turn_parity(uint32_t index) { return index / 2 & 1; }

// A warp arrives once, by one lane. compute-sanitizer's racecheck checks lanes one by one and takes
// that for the arrival of that lane alone, so that in a build for it every lane arrives.
#ifdef NVFP4_MOE_RACECHECK
inline constexpr int kArrivalsPerWarp = 32;
#else
inline constexpr int kArrivalsPerWarp = 1;
#endif

// One arrival for the whole warp, once all its lanes are there.
__device__ inline void arrive_as_warp(const uint64_t& mbarrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kArrivalsPerWarp) ptx::mbarrier_arrive(ptx::shared_address(&mbarrier));
}

}  // namespace nvfp4_moe::internal::cuda
