// Offsets of the parts of a packed layer in its device memory.
//
//   tensor scales (E + 1, 3) float | shifts (E + 1, 3) int32, fp8
//   | expert 0: joined gate/up tiles, or up's without a gate, down tiles | expert 1 | ...
//   | shared expert | biases (backend.h)
//
// Under fp8 the tensor scales on the device include each matrix's 2^shift, as alpha does.
#pragma once

#include <cstddef>

#include "backend/backend.h"
#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::internal::cuda {

struct MatrixTiles {
  int64_t row_tiles = 0;
  int64_t k_tiles = 0;
  int64_t bytes() const { return row_tiles * k_tiles * kTileBytes; }
};
// Weights of gemm1: gate and up, joined, or only up if the activation has no gate.
inline MatrixTiles gate_up_tiles(Activation activation, int64_t hidden, int64_t intermediate) {
  return {ceil_div(gate_rows(activation, intermediate) + intermediate, kTileRows),
          ceil_div(hidden, kTileK)};
}
inline MatrixTiles down_tiles(int64_t hidden, int64_t intermediate) {
  return {ceil_div(hidden, kTileRows), ceil_div(intermediate, kTileK)};
}

// The shifts of one expert's weights (core/fp8.h).
struct Fp8Shifts {
  int32_t gate = 0, up = 0, down = 0;
};

// Experts of one size: the routed ones, or the shared one.
struct PartLayout {
  int64_t offset = 0;         // of expert 0
  int64_t expert_stride = 0;  // bytes
  MatrixTiles gate_up, down;  // down follows gate_up
};

struct PackedLayout {
  PartLayout routed, shared;
  int64_t biases = 0;  // offset
  int64_t total_bytes = 0;

  PackedLayout(const MoeConfig& config, const ExpertRange& range) {
    const int64_t hidden = config->hidden_size;
    const bool fp8 = config->activation_format == ActivationFormat::kFp8;
    int64_t offset = (range.count + 1) *
                     static_cast<int64_t>(sizeof(TensorScales) + (fp8 ? sizeof(Fp8Shifts) : 0));
    offset = (offset + 255) / 256 * 256;
    routed = part(offset, config->activation, hidden, config->intermediate_size);
    offset += range.count * routed.expert_stride;
    shared = part(offset, config->activation, hidden, config->shared_intermediate_size);
    offset += shared.expert_stride;
    biases = offset;
    total_bytes = offset + static_cast<int64_t>(packed_biases_bytes(config, range));
  }
  const PartLayout& part_of(int64_t local_expert) const {
    return local_expert == kSharedExpert ? shared : routed;
  }
  int64_t expert_offset(int64_t local_expert) const {
    return local_expert == kSharedExpert ? shared.offset
                                         : routed.offset + local_expert * routed.expert_stride;
  }

 private:
  static PartLayout part(int64_t offset, Activation activation, int64_t hidden,
                         int64_t intermediate) {
    PartLayout part{offset, 0, gate_up_tiles(activation, hidden, intermediate),
                    down_tiles(hidden, intermediate)};
    if (intermediate == 0) part.gate_up = part.down = {};
    part.expert_stride = part.gate_up.bytes() + part.down.bytes();
    return part;
  }
};

// Device pointers of an expert's biases; null if it has none.
inline ExpertBiases expert_biases(const PackedWeights& weights, int64_t local_expert) {
  const PackedLayout layout(weights.config, weights.range);
  return packed_biases(weights, static_cast<size_t>(layout.biases), local_expert);
}

// Device pointer to an expert-indexed array of tensor scales.
inline const TensorScales* tensor_scales(const PackedWeights& weights, bool shared) {
  return reinterpret_cast<const TensorScales*>(weights.bytes.data()) +
         (shared ? weights.range.count : 0);
}
// The same for the shifts of a layer under fp8.
inline int64_t fp8_shifts_offset(const ExpertRange& range) {
  return (range.count + 1) * static_cast<int64_t>(sizeof(TensorScales));
}
inline const Fp8Shifts* fp8_shifts(const PackedWeights& weights, bool shared) {
  return reinterpret_cast<const Fp8Shifts*>(weights.bytes.data() +
                                            fp8_shifts_offset(weights.range)) +
         (shared ? weights.range.count : 0);
}

}  // namespace nvfp4_moe::internal::cuda
