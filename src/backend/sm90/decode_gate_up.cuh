// gemm1_swiglu of the layer in one launch (decode.cuh): a cta's share of gate and up, the
// activation function, and the intermediate in the order of B fragments.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/decode_batch.cuh"
#include "backend/sm90/decode_weights.cuh"

namespace nvfp4_moe::internal::sm90 {

// A flag for each row of the intermediate that has a nonfinite element. A grid uses the words of
// its phase, bit 31 of the counter before it: the next grid may already set flags while one cta of
// this grid still has to count and clear its own. The grid after that starts later.
inline constexpr int kDecodeRowWords = (kDecodeAssignments + kDecodeTokens + 31) / 32;
__device__ uint32_t decode_nonfinite_rows[2][kDecodeRowWords] = {};

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
    const uint32_t own_row =
        cuda::ptx::shared_address(x + (r < args.tokens ? r : 0) * row_bytes + q * 16);
    Bf16Products::Constants constants;
    constants.pin();
    DecodeRows rows(own_run);
    int32_t missing = 0;
    float own[4];
#pragma unroll 1
    while (rows.more()) {
      const int32_t end = rows.end(args.k_tiles);
      multiply_subtiles<false>(ring,
                               SharedColumns{own_row + static_cast<uint32_t>(rows.k_tile) * 256},
                               end - rows.k_tile, constants, own);
      if (rows.k_tile > 0) {
        partials.put(own_run.warp, own);
      } else {
        missing = args.k_tiles - end;
        if (missing > 0) break;
        store(rows.row, own);
      }
      rows.advance(end);
    }
    if constexpr (kGated) {
      // Everything but the partials is read before the barrier.
      Output outputs[2];
      if (missing > 0) {
        const DecodeGroup group(args, share, share.first_group + rows.row);
#pragma unroll
        for (int32_t i = 0; i < 2; ++i)
          outputs[i] =
              output(group, group.group * 8 + r, q * 2 + i, routing.rows[group.active][q * 2 + i]);
      }
      __syncthreads();
      if (missing == 0) return;
      partials.add_rest(own_run, missing, own);
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) store(outputs[i], own[i], own[2 + i]);
    } else {
      __syncthreads();
      if (missing == 0) return;
      partials.add_rest(own_run, missing, own);
      store(rows.row, own);
    }
  }

  // How two accumulators become an element of the intermediate.
  struct Output {
    uint16_t *to, *padding;  // null: none
    int32_t assignment;
    float gate_scale, up_scale, factor;
    cuda::LaneBiases bias;
  };
  __device__ Output output(const DecodeGroup& group, int32_t channel, int32_t token,
                           int32_t assignment) const {
    Output of{};
    if (assignment < 0) return of;
    const DecodePart& part = part_of(args, share, group.active);
    const DecodeScales& scales = routing.scales[group.active];
    // a nonfinite token's rows are NaN
    float scale;
    if constexpr (kFp8)
      scale = routing.hidden_scales[token];
    else
      scale = (routing.nonfinite_tokens >> token & 1) != 0 ? __uint_as_float(0x7FC00000u) : 1.0f;
    of.gate_scale = scale * scales.gate, of.up_scale = scale * scales.up;
    const int32_t expert = routing.expert_of[group.active];
    if constexpr (kGated)
      of.bias = part.gemm1_biases.of(expert, static_cast<uint32_t>(channel), part.channels);
    else
      of.bias.second = part.gemm1_biases.one(expert, static_cast<uint32_t>(channel), part.channels);
    of.factor = args.before_down && group.active < share.active_experts
                    ? routing.weights[assignment]
                    : 1.0f;
    of.assignment = assignment;
    uint16_t* const row = decode_row(args, assignment);
    if constexpr (kFp8) {
      of.to = row + channel;
    } else {
      of.to = row + fragment_element(channel);
      // the rest of the row's last 32 elements is multiplied too
      if (part.row_elems != part.channels && channel >= part.channels - 16)
        of.padding = row + fragment_element(channel + 16);
    }
    return of;
  }
  __device__ void store(const Output& of, float gate, float up) const {
    constexpr float kFactor = Products::kAccumulatorFactor;
    if (of.to == nullptr) return;
    float value;
    if constexpr (kGated) {
      const float g = fmaf(gate * kFactor, of.gate_scale, of.bias.first),
                  u = fmaf(up * kFactor, of.up_scale, of.bias.second);
      if constexpr (kFunction == cuda::Gemm1Function::kGeluOrSitu)
        value = args.gelu_or_situ.gated<false>(g, u);
      else
        value = args.activation.gated<false>(g, u);
    } else {
      value = cuda::relu2(fmaf(up * kFactor, of.up_scale, of.bias.second));
    }
    const uint16_t rounded = cuda::bf16_from_float(value * of.factor);
    *of.to = rounded;
    if (!kFp8 && (rounded & 0x7F80u) == 0x7F80u)
      atomicOr(&decode_nonfinite_rows[routing.grid_before >> 31][of.assignment / 32],
               1u << of.assignment % 32);
    if (of.padding != nullptr) *of.padding = 0;
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
    store(output(group, channel, token, assignment), gate, up);
  }
};

}  // namespace nvfp4_moe::internal::sm90
