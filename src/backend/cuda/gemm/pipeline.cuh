// The pipeline of a persistent GEMM's cta: the number of stages that fit into shared memory, a
// role's position in the pipeline, and how a warp arrives at its barriers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/address.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"

namespace nvfp4_moe::internal::cuda {

// SharedOf<Traits, stages>: the shared memory of a cta with that many stages. Returns as many
// stages as fit into kBytes, at most kMost.
template <template <class, int> class SharedOf, class Traits, int kBytes, int kMost>
constexpr int fitting_stages() {
  if constexpr (sizeof(SharedOf<Traits, kMost>) <= kBytes)
    return kMost;
  else
    return fitting_stages<SharedOf, Traits, kBytes, kMost - 1>();
}

// A stage, and the parity of the current round through all stages.
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

// Per-work-tile state is double-buffered. Returns the parity of the round in which work tile
// `index` uses its buffer.
__device__ inline uint32_t turn_parity(uint32_t index) { return index / 2 & 1; }

// A warp arrives once, by one lane. compute-sanitizer's racecheck checks lanes individually and
// would count only that lane's arrival, so in a build for it every lane arrives.
#ifdef NVFP4_MOE_RACECHECK
inline constexpr int kArrivalsPerWarp = 32;
#else
inline constexpr int kArrivalsPerWarp = 1;
#endif

// One arrival for the whole warp, after all its lanes.
__device__ inline void arrive_as_warp(const uint64_t& mbarrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kArrivalsPerWarp) ptx::mbarrier_arrive(ptx::shared_address(&mbarrier));
}

}  // namespace nvfp4_moe::internal::cuda
