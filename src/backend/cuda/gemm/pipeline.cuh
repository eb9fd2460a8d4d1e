// The pipeline of a persistent GEMM's cta: how many stages its shared memory has room for, and where a role stands in it.
#pragma once

#include <cstdint>

namespace nvfp4_moe::cuda {

// SharedOf<Traits, stages>: the shared memory of a cta with so many. As many stages as fit into kBytes, kMost at most.
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

// What belongs to work tiles stands twice, for them by turns. The parity of the turn in which work tile `index` has its
// half.
__device__ inline uint32_t turn_parity(uint32_t index) { return index / 2 & 1; }

}  // namespace nvfp4_moe::cuda
