// gemm1_swiglu of the layer in one launch (decode.cuh): a cta's share of gate and up, the
// activation function, and the intermediate in the order of B fragments.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/decode_batch.cuh"
#include "backend/sm90/decode_weights.cuh"

namespace nvfp4_moe::internal::sm90 {

// Row of the intermediate of an assignment.
__device__ inline uint16_t* decode_row(const DecodeArgs& args, int32_t assignment) {
  const auto routed = static_cast<int32_t>(args.ids.assignments);
  return assignment < routed
             ? args.routed.rows + int64_t{assignment} * args.routed.row_elems
             : args.shared.rows + int64_t{assignment - routed} * args.shared.row_elems;
}

// Products: Bf16Products, or Fp8Products, which have another run() (decode_fp8.cuh).
template <cuda::Gemm1Function kFunction, class Products = Bf16Products>
struct DecodeGateUp {
  static constexpr bool kFp8 = std::is_same_v<Products, Fp8Products>;
  static constexpr bool kGated = kFunction != cuda::Gemm1Function::kRelu2;

  const DecodeArgsOf<kFunction>& args;
  const DecodeShare& share;
  const DecodeRoutingOf<Products>& routing;

  // x: hidden (T, row_bytes).
  __device__ void run(DecodeRing<DecodeSubtiles>& ring, const DecodeRun& own_run, const uint8_t* x,
                      int32_t row_bytes, const DecodePartials& partials) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t q = lane % 4, r = lane / 4;
    const uint8_t* const own_row = x + (r < args.tokens ? r : 0) * row_bytes + q * 16;
    Bf16Products::Constants constants;
    constants.pin();
    DecodeRows rows(own_run);
    int32_t missing = 0;
    float own[4];
#pragma unroll 1
    while (rows.more()) {
      const int32_t end = rows.end(args.k_tiles);
      multiply_subtiles<false>(ring, own_row, rows.k_tile, end, constants, own);
      if (rows.k_tile > 0) {
        partials.put(own_run.warp, own);
      } else {
        missing = args.k_tiles - end;
        if (missing > 0) break;
        store(rows.row, own);
      }
      rows.advance(end);
    }
    __syncthreads();
    if (missing == 0) return;
    partials.add_rest(own_run, missing, own);
    store(rows.row, own);
  }

  // Stores the outputs of a row of subtiles. own: rows r and r + 8 of the group, tokens 2q and
  // 2q + 1.
  __device__ void store(int32_t row, const float (&own)[4]) const {
    const DecodeGroup group(args, share, share.first_group + row);
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t r = lane / 4;
#pragma unroll 1
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t token = lane % 4 * 2 + i, assignment = routing.rows[group.active][token];
      if (assignment < 0) continue;
      const float low = i == 0 ? own[0] : own[1], high = i == 0 ? own[2] : own[3];
      if constexpr (kGated) {
        store(group, group.group * 8 + r, token, assignment, low, high);
      } else {
        store(group, group.group * 16 + r, token, assignment, 0, low);
        store(group, group.group * 16 + r + 8, token, assignment, 0, high);
      }
    }
  }
  __device__ void store(const DecodeGroup& group, int32_t channel, int32_t token,
                        int32_t assignment, float gate, float up) const {
    constexpr float kFactor = Products::kAccumulatorFactor;
    const DecodePart& part = part_of(args, share, group.active);
    const DecodeScales& scales = routing.scales[group.active];
    // a nonfinite token's rows are NaN
    float scale;
    if constexpr (kFp8)
      scale = routing.hidden_scales[token];
    else
      scale = (routing.nonfinite_tokens >> token & 1) != 0 ? __uint_as_float(0x7FC00000u) : 1.0f;
    float value;
    if constexpr (kGated) {
      const cuda::LaneBiases bias = part.gemm1_biases.of(
          routing.expert_of[group.active], static_cast<uint32_t>(channel), part.channels);
      if constexpr (kFunction == cuda::Gemm1Function::kGeluOrSitu)
        value =
            args.gelu_or_situ.gated<false>(fmaf(gate * kFactor, scale * scales.gate, bias.first),
                                           fmaf(up * kFactor, scale * scales.up, bias.second));
      else
        value = args.activation.gated<false>(fmaf(gate * kFactor, scale * scales.gate, bias.first),
                                             fmaf(up * kFactor, scale * scales.up, bias.second));
    } else {
      const float bias = part.gemm1_biases.one(routing.expert_of[group.active],
                                               static_cast<uint32_t>(channel), part.channels);
      value = cuda::relu2(fmaf(up * kFactor, scale * scales.up, bias));
    }
    if (args.before_down && group.active < share.active_experts)
      value *= routing.weights[assignment];
    uint16_t* const row = decode_row(args, assignment);
    if constexpr (kFp8) {
      row[channel] = cuda::bf16_from_float(value);
      return;
    }
    row[fragment_element(channel)] = cuda::bf16_from_float(value);
    // the rest of the row's last 32 elements is multiplied too
    if (part.row_elems != part.channels && channel >= part.channels - 16)
      row[fragment_element(channel + 16)] = 0;
  }
};

}  // namespace nvfp4_moe::internal::sm90
