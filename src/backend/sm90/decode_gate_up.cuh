// gemm1_swiglu of the layer in one launch (decode.cuh): a cta's share of gate and up, the
// activation function, and the intermediate in the order of B fragments.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/named_barrier.cuh"
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

// kColumns: tokens whose accumulators are kept: 1, 2, 4 or 8. Products: Bf16Products or
// Fp8Products, which have a run() of their own (decode_fp8.cuh).
template <cuda::Gemm1Function kFunction, int kColumns, class Products = Bf16Products>
struct DecodeGateUp {
  static constexpr bool kFp8 = std::is_same_v<Products, Fp8Products>;
  static constexpr bool kGated = kFunction != cuda::Gemm1Function::kRelu2;
  static constexpr int kBatch = 8 / kColumns;      // groups between two barriers of a warps
  static constexpr int kPartials = 16 * kColumns;  // of a group and a warp
  static constexpr int kChannels = kGated ? 8 : 16;
  static constexpr int kPartialBytes = 2 * kDecodeWarps * kBatch * kPartials * 4;

  const DecodeArgsOf<kFunction>& args;
  const DecodeShare& share;
  const DecodeRoutingOf<Products>& routing;
  const uint8_t* x;  // hidden: (T, row_bytes)
  int32_t row_bytes;
  float* partials;  // (2, 16 warps, kBatch, kPartials)

  __device__ void run(DecodeRing<>& ring) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32),
               warp = static_cast<int32_t>(threadIdx.x / 32);
    const int32_t q = lane % 4, r = lane / 4;
    const uint8_t* const own_row =
        x + (kColumns == 1 || r >= args.tokens ? 0 : r) * row_bytes + q * 16;
    Bf16Products::Constants constants;
    constants.pin();
    const int32_t warps_m = gate_up_warps_m(args), warps_k = 1 << args.gate_up_k_shift;
    DecodeGroup at(args, share, share.first_group + share.gate_up_m);
    int buffer = 0;
#pragma unroll 1
    for (int32_t first = share.first_group + share.gate_up_m; first < share.last_group;
         first += warps_m * kBatch) {
      DecodeGroup group = at;
      int32_t index = first;
#pragma unroll 1
      for (int i = 0; i < kBatch && index < share.last_group; ++i, index += warps_m) {
        DecodeAccumulators accumulators;
#pragma unroll 1
        for (int32_t k_tile = share.gate_up_k; k_tile < args.k_tiles; k_tile += warps_k) {
          Bf16Products::Weights weights[2];
          DecodeColumns columns;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            columns.words[j] = *reinterpret_cast<const uint4*>(own_row + (k_tile * 4 + j) * 64);
          ring.take<false>(weights);
          accumulators.multiply(weights, columns, constants);
        }
        float* const to = partials + ((buffer * kDecodeWarps + warp) * kBatch + i) * kPartials;
        if constexpr (kColumns == 1) {
          if (q == 0) to[r] = accumulators.at(0), to[r + 8] = accumulators.at(2);
        } else if (q * 2 < kColumns) {
          float* const own = to + r * kColumns + q * 2;
          *reinterpret_cast<float2*>(own) = make_float2(accumulators.at(0), accumulators.at(1));
          *reinterpret_cast<float2*>(own + 8 * kColumns) =
              make_float2(accumulators.at(2), accumulators.at(3));
        }
        group.advance(args, share, warps_m);
      }
      if (warps_k == 1)
        __syncwarp();
      else
        cuda::ptx::named_barrier_sync(1 + share.gate_up_m, warps_k * 32);
      store_batch(at, first,
                  partials + (buffer * kDecodeWarps + (share.gate_up_m << args.gate_up_k_shift)) *
                                 kBatch * kPartials);
      at = group;
      buffer ^= 1;
    }
  }

  // Stores the outputs of a batch of groups, from the partials of the warps that share them.
  // Several lanes add the partials of one output.
  __device__ void store_batch(const DecodeGroup& first_group, int32_t first,
                              const float* of_warps) const {
    constexpr int kOutputs = kBatch * kChannels * kColumns;
    const int32_t warps_m = gate_up_warps_m(args), warps_k = 1 << args.gate_up_k_shift;
    const int32_t thread = static_cast<int32_t>(threadIdx.x) & (warps_k * 32 - 1),
                  adder_shift = max(args.gate_up_k_shift - 1, 0), adders = 1 << adder_shift,
                  adder = thread & (adders - 1);
#pragma unroll 1
    for (int32_t output = thread >> adder_shift; output < kOutputs;
         output += (warps_k * 32) >> adder_shift) {
      const int32_t in_batch = output / (kChannels * kColumns),
                    channel_of_group = output / kColumns % kChannels, token = output % kColumns;
      float gate = 0, up = 0;
#pragma unroll 1
      for (int32_t warp_k = adder; warp_k < warps_k; warp_k += adders) {
        const float* const from = of_warps + (warp_k * kBatch + in_batch) * kPartials;
        if constexpr (kGated) gate += from[channel_of_group * kColumns + token];
        up += from[(channel_of_group + (kGated ? 8 : 0)) * kColumns + token];
      }
#pragma unroll 1
      for (int32_t distance = adders / 2; distance > 0; distance /= 2) {
        if constexpr (kGated) gate += __shfl_xor_sync(cuda::kAllLanes, gate, distance);
        up += __shfl_xor_sync(cuda::kAllLanes, up, distance);
      }
      if (adder != 0 || first + in_batch * warps_m >= share.last_group || token >= args.tokens)
        continue;
      DecodeGroup group = first_group;
      group.advance(args, share, in_batch * warps_m);
      const int32_t assignment = routing.rows[group.active][token];
      if (assignment >= 0)
        store(group, group.group * kChannels + channel_of_group, token, assignment, gate, up);
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
