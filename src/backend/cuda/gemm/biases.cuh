// The biases of a layer's routed experts, as read by the epilogue of a grouped GEMM.
//
// A lane's accumulators belong to two weight rows, r and r + 8: gate and up of one channel, or two
// channels of down, or of up if there is no gate. So a lane needs only two biases for any number of
// rows of activations.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/packed_layout.h"
#include "backend/cuda/ptx/prefetch.cuh"

namespace nvfp4_moe::internal::cuda {

// The biases of a lane's two weight rows. Adding -0 leaves every value unchanged, including the
// sign of zeros. So without biases the epilogue adds -0 and gives the same bits as without an
// addition.
struct LaneBiases {
  float first = -0.0f, second = -0.0f;
};

struct BiasTable {
  const float* biases;    // of expert 0 and the first channel; null: no biases
  int32_t expert_stride;  // in floats
  int32_t to_second;  // distance from the bias of a lane's first weight row to that of its second

  // Called before a tile is multiplied, so that its biases are in L2 when they are added, without
  // holding registers.
  __device__ void prefetch(int32_t expert, uint32_t channel, int64_t channels) const {
    if (biases == nullptr || channel >= channels) return;
    const float* const at = address(expert, channel);
    ptx::prefetch_l2(at);
    ptx::prefetch_l2(at + to_second);
  }
  // channel: of the first weight row. From `channels` on neither row has a bias.
  __device__ LaneBiases of(int32_t expert, uint32_t channel, int64_t channels) const {
    if (biases == nullptr || channel >= channels) return {};
    const float* const at = address(expert, channel);
    return {__ldg(at), __ldg(at + to_second)};
  }
  // The bias of one weight row alone, which may be the last.
  __device__ float one(int32_t expert, uint32_t channel, int64_t channels) const {
    return biases == nullptr || channel >= channels ? -0.0f : __ldg(address(expert, channel));
  }
  __device__ const float* address(int32_t expert, uint32_t channel) const {
    return biases + int64_t{expert} * expert_stride + channel;
  }
};

// The tables for a part's GEMMs. The shared expert has no biases.
inline BiasTable bias_table(const PackedWeights& weights, const float* of_expert_0,
                            int64_t to_second) {
  return {of_expert_0, static_cast<int32_t>(biases_of_one(weights.config)),
          static_cast<int32_t>(to_second)};
}
inline BiasTable gemm1_biases(const PackedWeights& weights, bool shared) {
  const ExpertBiases first = expert_biases(weights, shared ? kSharedExpert : 0);
  if (!has_gate(weights.config->activation)) return bias_table(weights, first.up, kGroupRows / 2);
  return bias_table(weights, first.gate, weights.config->intermediate_size);
}
inline BiasTable down_biases(const PackedWeights& weights, bool shared) {
  return bias_table(weights, expert_biases(weights, shared ? kSharedExpert : 0).down,
                    kGroupRows / 2);
}

}  // namespace nvfp4_moe::internal::cuda
