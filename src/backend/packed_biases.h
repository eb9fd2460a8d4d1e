// Where a backend keeps the biases of a layer's routed experts: behind its matrices, in the same memory, so that whatever
// keeps or maps packed weights has them too.
//
// (E, 2 I + H) fp32, those of gate, up and down of one expert behind each other; (E, I + H) without a gate. Nothing without
// expert_biases. Only what reads or writes them minds whether that memory is a host's.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "backend/backend.h"

namespace nvfp4_moe {

inline size_t biases_of_one(const MoeConfig& config) {
  return static_cast<size_t>(gate_rows(config->activation, config->intermediate_size) + config->intermediate_size +
                             config->hidden_size);
}
inline size_t packed_biases_bytes(const MoeConfig& config, const ExpertRange& range) {
  return config->expert_biases ? static_cast<size_t>(range.count) * biases_of_one(config) * sizeof(float) : 0;
}

// at: bytes of what lies before them, a multiple of 16. None of the shared expert.
inline ExpertBiases packed_biases(const PackedWeights& weights, size_t at, int64_t local_expert) {
  const MoeConfig& config = weights.config;
  if (!config->expert_biases || local_expert == kSharedExpert) return {};
  const auto* first = reinterpret_cast<const float*>(weights.bytes.data() + at) +
                      static_cast<size_t>(local_expert) * biases_of_one(config);
  const float* up = first + gate_rows(config->activation, config->intermediate_size);
  return {up == first ? nullptr : first, up, up + config->intermediate_size};
}

// How biases get into packed bytes and out of them: copy(to, from, bytes), a Status. This is for a host's memory.
struct CopyInHostMemory {
  Status operator()(void* to, const void* from, size_t bytes) const {
    std::memcpy(to, from, bytes);
    return {};
  }
};

template <class Copy = CopyInHostMemory>
Status store_biases(PackedWeights& weights, size_t at, int64_t local_expert, const ExpertBiases& source,
                    const Copy& copy = {}) {
  const ExpertBiases to = packed_biases(weights, at, local_expert);
  const auto inner = static_cast<size_t>(weights.config->intermediate_size),
             hidden = static_cast<size_t>(weights.config->hidden_size);
  const auto store = [&](const float* into, const float* from, size_t count) {  // into our own writable bytes
    return into == nullptr ? Status() : copy(const_cast<float*>(into), from, count * sizeof(float));
  };
  NVFP4_MOE_TRY(store(to.gate, source.gate, inner));
  NVFP4_MOE_TRY(store(to.up, source.up, inner));
  return store(to.down, source.down, hidden);
}

template <class Copy = CopyInHostMemory>
Status unpack_biases(const PackedWeights& weights, size_t at, int64_t local_expert, ExpertBuffers& out,
                     const Copy& copy = {}) {
  const ExpertBiases from = packed_biases(weights, at, local_expert);
  const auto inner = static_cast<size_t>(weights.config->intermediate_size),
             hidden = static_cast<size_t>(weights.config->hidden_size);
  const auto unpack = [&](std::vector<float>& to, const float* bias, size_t count) {
    to.resize(bias == nullptr ? 0 : count);
    return bias == nullptr ? Status() : copy(to.data(), bias, count * sizeof(float));
  };
  NVFP4_MOE_TRY(unpack(out.gate_bias, from.gate, inner));
  NVFP4_MOE_TRY(unpack(out.up_bias, from.up, inner));
  return unpack(out.down_bias, from.down, hidden);
}

}  // namespace nvfp4_moe
