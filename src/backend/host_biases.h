// Where a host's backend keeps the biases of a layer's routed experts: behind its matrices, in the same memory, so that
// whatever keeps or maps packed weights has them too.
//
// (E, 2 I + H) fp32, those of gate, up and down of one expert behind each other; (E, I + H) without a gate. Nothing
// without expert_biases.
#pragma once

#include <algorithm>
#include <cstddef>

#include "backend/backend.h"

namespace nvfp4_moe {

inline size_t host_biases_of_one(const MoeConfig& config) {
  return static_cast<size_t>(gate_rows(config->activation, config->intermediate_size) + config->intermediate_size +
                             config->hidden_size);
}
inline size_t host_biases_bytes(const MoeConfig& config, const ExpertRange& range) {
  return config->expert_biases ? static_cast<size_t>(range.count) * host_biases_of_one(config) * sizeof(float) : 0;
}

// at: bytes of the matrices, a multiple of 16. None of the shared expert.
inline ExpertBiases host_biases(const PackedWeights& weights, size_t at, int64_t local_expert) {
  const MoeConfig& config = weights.config;
  if (!config->expert_biases || local_expert == kSharedExpert) return {};
  const auto* first = reinterpret_cast<const float*>(weights.bytes.data() + at) +
                      static_cast<size_t>(local_expert) * host_biases_of_one(config);
  const float* up = first + gate_rows(config->activation, config->intermediate_size);
  return {up == first ? nullptr : first, up, up + config->intermediate_size};
}

inline void store_host_biases(PackedWeights& weights, size_t at, int64_t local_expert, const ExpertBiases& source) {
  const int64_t inner = weights.config->intermediate_size, hidden = weights.config->hidden_size;
  const ExpertBiases to = host_biases(weights, at, local_expert);
  const auto store = [](const float* from, int64_t count, const float* into) {  // our own writable bytes
    if (into != nullptr) std::copy_n(from, count, const_cast<float*>(into));
  };
  store(source.gate, inner, to.gate);
  store(source.up, inner, to.up);
  store(source.down, hidden, to.down);
}

inline void unpack_host_biases(const PackedWeights& weights, size_t at, int64_t local_expert, ExpertBuffers& out) {
  const int64_t inner = weights.config->intermediate_size, hidden = weights.config->hidden_size;
  const ExpertBiases biases = host_biases(weights, at, local_expert);
  const auto copy = [](const float* from, int64_t count, std::vector<float>& to) {
    from == nullptr ? to.clear() : to.assign(from, from + count);
  };
  copy(biases.gate, inner, out.gate_bias);
  copy(biases.up, inner, out.up_bias);
  copy(biases.down, hidden, out.down_bias);
}

}  // namespace nvfp4_moe
