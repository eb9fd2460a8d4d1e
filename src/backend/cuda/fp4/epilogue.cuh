// The epilogues of GEMMs on FP4 tensor cores: fp32 accumulators to a step's output.
//
//   gemm1   g = alpha_gate * dot, u = alpha_up * dot; the gated activation, the router weight under
//           before_down, one rounding to bf16. Gate and up of a channel are weight rows r and
//           r + 8, both in one lane. Without a gate relu2(u), and rows r and r + 8 are two channels
//   gemm2   alpha_down * dot, one rounding to row_format
//
// Each dot product gets its bias, if there is one. alpha = fl32(row scale * tensor scale). The
// scale of a nonfinite row is NaN, and so are its outputs.
//
// The intermediate is stored in bf16 even if its scale is fixed. A row with NaN or Inf must not be
// quantized or counted, but that is known only when all its channels are ready, and they come from
// many ctas. Requantize, the step that all GPUs share, sees whole rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/backend.h"
#include "backend/cuda/fp4/gemm_params.cuh"
#include "backend/cuda/gemm/biases.cuh"
#include "backend/cuda/gemm/gated_activation.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/steps/formats.cuh"

namespace nvfp4_moe::internal::cuda::fp4 {

struct SwigluEpilogue {
  const TensorScales* tensor_scales;  // (E)
  const float* row_scale;             // (T); null for rows in bf16
  const float* router_weights;        // (T k) by assignment, or null: 1
  BiasTable bias_table;
  GatedActivation activation;
  uint16_t* out;     // (R, I) bf16
  int64_t channels;  // I

  __device__ RowFactor factor(int32_t expert, int32_t token, int32_t assignment) const {
    return {row_scale[token] * tensor_scales[expert].gate,
            row_scale[token] * tensor_scales[expert].up,
            router_weights != nullptr ? router_weights[assignment] : 1.0f};
  }
  __device__ LaneBiases biases(int32_t expert, int32_t weight_row) const {
    return bias_table.of(expert, joined_channel(weight_row), channels);
  }
  // gate, up: accumulators of weight rows `weight_row` and `weight_row` + 8.
  __device__ void store(int64_t row, int32_t weight_row, float gate, float up,
                        const RowFactor& factor, const LaneBiases& bias) const {
    const int64_t channel = joined_channel(weight_row);
    if (channel >= channels) return;
    const float g = fmaf(gate, factor.first, bias.first), u = fmaf(up, factor.second, bias.second);
    const float h = activation.gated<false>(g, u) * factor.weight;
    out[row * channels + channel] = bf16_from_float(h);
  }
};

// For rows in bf16, which have no scale: that of a nonfinite row is NaN, of others 1.
struct Bf16SwigluEpilogue : SwigluEpilogue {
  const uint8_t* nonfinite;  // (T)

  __device__ RowFactor factor(int32_t expert, int32_t token, int32_t assignment) const {
    const float scale = nonfinite[token] != 0 ? __uint_as_float(0x7FC00000u) : 1.0f;
    return {scale * tensor_scales[expert].gate, scale * tensor_scales[expert].up,
            router_weights != nullptr ? router_weights[assignment] : 1.0f};
  }
};

// For gelu, gelu_tanh and situ. Gated: either of the above.
template <class Gated>
struct GeluOrSituEpilogue : Gated {
  GeluOrSitu function;

  __device__ void store(int64_t row, int32_t weight_row, float gate, float up,
                        const RowFactor& factor, const LaneBiases& bias) const {
    const int64_t channel = joined_channel(weight_row);
    if (channel >= this->channels) return;
    const float g = fmaf(gate, factor.first, bias.first), u = fmaf(up, factor.second, bias.second);
    const float h = function.template gated<false>(g, u) * factor.weight;
    this->out[row * this->channels + channel] = bf16_from_float(h);
  }
};

// For a layer without a gate: weight rows are channels of up, whose alpha is a row's second factor.
// Gated: as above.
template <class Gated>
struct Relu2Epilogue : Gated {
  __device__ LaneBiases biases(int32_t expert, int32_t channel) const {
    return this->bias_table.of(expert, channel, this->channels);
  }
  // first, second: accumulators of channels `channel` and `channel` + 8.
  __device__ void store(int64_t row, int32_t channel, float first, float second,
                        const RowFactor& factor, const LaneBiases& bias) const {
    if (channel >= this->channels) return;  // the number of channels is a multiple of 16
    uint16_t* const to = this->out + row * this->channels + channel;
    to[0] = bf16_from_float(relu2(fmaf(first, factor.second, bias.first)) * factor.weight);
    to[8] = bf16_from_float(relu2(fmaf(second, factor.second, bias.second)) * factor.weight);
  }
};

struct DownEpilogue {
  const TensorScales* tensor_scales;  // (E)
  const float* row_scale;             // (R), or null: 1
  BiasTable bias_table;
  void* out;  // (R, H) bf16, or fp32
  bool out_fp32;
  int64_t channels;  // H

  // Rows of x are already rows in expert order.
  __device__ RowFactor factor(int32_t expert, int32_t row, int32_t) const {
    return {(row_scale != nullptr ? row_scale[row] : 1.0f) * tensor_scales[expert].down, 0, 1};
  }
  __device__ LaneBiases biases(int32_t expert, int32_t channel) const {
    return bias_table.of(expert, channel, channels);
  }
  // first, second: accumulators of channels `channel` and `channel` + 8.
  __device__ void store(int64_t row, int32_t channel, float first, float second,
                        const RowFactor& factor, const LaneBiases& bias) const {
    if (channel >= channels) return;  // the number of channels is a multiple of 16
    store_one(row * channels + channel, fmaf(first, factor.first, bias.first));
    store_one(row * channels + channel + 8, fmaf(second, factor.first, bias.second));
  }
  __device__ void store_one(int64_t at, float value) const {
    if (out_fp32)
      static_cast<float*>(out)[at] = value;
    else
      static_cast<uint16_t*>(out)[at] = bf16_from_float(value);
  }
};

// The first of a lane's two weight rows in a group of 16, and the biases of both.
__device__ inline int32_t lane_weight_row(int32_t m_tile, int group) {
  return m_tile * kTileRows + group * kGroupRows + static_cast<int>(threadIdx.x % 32) / 4;
}
template <class Epilogue>
__device__ LaneBiases lane_biases(const Epilogue& epilogue, const TileRows& rows, int32_t m_tile,
                                  int group) {
  return epilogue.biases(rows.expert, lane_weight_row(m_tile, group));
}

// Stores a lane's four accumulators of a group of 16 weight rows and eight rows of activations.
// With r = lane / 4 and q = lane % 4 they are (weight row r, row 2q), (r, 2q + 1), (r + 8, 2q), (r
// + 8, 2q + 1): the d of mma.sync, and what tcgen05.ld returns in its shape 16x256b. biases:
// lane_biases of the group.
template <class Epilogue>
__device__ void store_fragment(const Epilogue& epilogue, const TileRows& rows,
                               const RowFactor* factors, int32_t m_tile, int group, int octet,
                               const float (&of)[4], const LaneBiases& biases) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int32_t weight_row = lane_weight_row(m_tile, group);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = octet * 8 + lane % 4 * 2 + i;
    if (row < rows.count)
      epilogue.store(rows.first + row, weight_row, of[i], of[2 + i], factors[row], biases);
  }
}

}  // namespace nvfp4_moe::internal::cuda::fp4
