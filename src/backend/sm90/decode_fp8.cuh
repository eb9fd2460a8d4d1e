// The layer of a few tokens in one launch (decode.cuh) with E4M3 activations (W4A8).
//
// Hopper multiplies E4M3 by wgmma only, so the four warps of a warpgroup multiply together: each
// has 16 weight rows of its own, from its own ring, and all have the same activations. Warps with
// the same weight rows share them along K. For that a product has 32 columns: the j-th eight of
// them are the activations j tiles further, which the descriptor's stride gives without a copy, and
// a warp keeps those columns that belong to its tile.
//
//   gate/up   columns are tokens
//   down      columns are the tokens of the expert; every cta quantizes the whole intermediate
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "backend/cuda/ptx/address.cuh"
#include "backend/cuda/ptx/arithmetic.cuh"
#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/named_barrier.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/sm90/decode_down.cuh"
#include "backend/sm90/decode_fp8_rows.cuh"
#include "backend/sm90/decode_fp8_share.cuh"
#include "backend/sm90/decode_gate_up.cuh"

namespace nvfp4_moe::internal::sm90 {

template <cuda::Gemm1Function kFunction>
struct Fp8DecodeArgsOf : DecodeArgsOf<kFunction> {
  cuda::RowScaleRule hidden_rule, intermediate_rule;
};

// The table of Fp8Products follows the rings: 16 copies of each entry. An index of bytes that are
// no weights may be any byte, and reads shared memory beyond the table.
inline constexpr int kFp8Copies = 16;
static_assert(kFp8TableBytes == kFp8ScaleIndices * kFp8Copies * 8);

__device__ inline void fill_fp8_table(uint8_t* table) {
  constexpr int kVectors = kFp8Copies / 2;
#pragma unroll 1
  for (auto i = static_cast<int32_t>(threadIdx.x); i < kFp8ScaleIndices * kVectors;
       i += kDecodeThreads) {
    const uint2 entry = Fp8Products::magnitudes(static_cast<uint32_t>(i / kVectors));
    reinterpret_cast<uint4*>(table)[i] = make_uint4(entry.x, entry.y, entry.x, entry.y);
  }
}

// A warp's weights: the subtile that it has read last, and its ring.
struct Fp8Stream {
  Fp8Ring& ring;
  uint32_t table;  // of this lane's copy
  Fp8Products::Weights weights[2];

  __device__ Fp8Stream(Fp8Ring& ring_, const uint8_t* table_)
      : ring(ring_), table(cuda::ptx::shared_address(table_) + threadIdx.x % kFp8Copies * 8) {}
  // Reads the oldest subtile of the ring once it has arrived.
  __device__ void read() {
    cuda::ptx::cp_async_wait_group<kDecodeDepth - 1>();
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 codes = Fp8Ring::load_shared_16(ring.lane_codes + ring.slot + half * 512);
      weights[half].codes[0] = codes.x, weights[half].codes[1] = codes.y;
      weights[half].codes[2] = codes.z, weights[half].codes[3] = codes.w;
      uint16_t scales;
      asm volatile("ld.shared.u16 %0, [%1];"
                   : "=h"(scales)
                   : "r"(ring.lane_scales + ring.slot + half * 64)
                   : "memory");
      weights[half].scales = scales;
    }
#pragma unroll
    for (auto& of_half : weights) {
      of_half.magnitudes[0] = entry(of_half.scales & 0xFF);
      of_half.magnitudes[1] = entry(of_half.scales >> 8);
    }
    __syncwarp();
  }
  // Fp8Products::dequantize in seven instructions for a word: __byte_perm would mask its picks
  // again, which takes one or two more.
  __device__ static void dequantize(const Fp8Products::Weights& weights, int step,
                                    uint32_t* fragment) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = weights.codes[2 * i + step], picks = word & 0x77777777u;
      const uint2 bytes = weights.magnitudes[i];
      fragment[i] = cuda::ptx::prmt(bytes, picks) | (word & 0x80808080u);
      fragment[2 + i] = cuda::ptx::prmt(bytes, picks >> 16) | (word << 4 & 0x80808080u);
    }
  }
  __device__ uint2 entry(uint32_t index) const {
    return Fp8Ring::load_shared_8(table + index * (kFp8Copies * 8));
  }

  // A row of subtiles times the columns, this warp's part of K. own: rows r and r + 8, columns 2q
  // and 2q + 1. valid: this warp has such a row; all_valid: all warps of the warpgroup have.
  template <bool kDown>
  __device__ void multiply(const Fp8Warp& warp, const Fp8Columns& columns, int32_t k_tiles,
                           bool valid, bool all_valid, float (&own)[4]) {
    float accumulators[16] = {};
    const auto count = static_cast<uint32_t>(columns.count);
    // The descriptor counts in 16 bytes: from a run to the next, from a tile to the next.
    uint32_t rows = (cuda::ptx::shared_address(columns.at) >> 4) +
                    static_cast<uint32_t>(warp.k) * count * 8 + (count << 16);
    const int32_t steps = warp.steps(k_tiles, warp.k),
                  own_steps = valid ? warp.steps(k_tiles, warp.k_warp) : 0,
                  full =
                      all_valid ? warp.steps(k_tiles, warp.k + min((1 << warp.shift) - 1, 3)) : 0;
    const auto step_of = [&]<bool kFull>(bool has) {
      uint32_t fragments[16];
      if (kFull || has) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
          dequantize(weights[step / 2], step % 2, fragments + 4 * step);
      } else {
#pragma unroll
        for (uint32_t& word : fragments) word = 0;
      }
      cuda::ptx::pin(fragments);
      cuda::ptx::wgmma_fence();
#pragma unroll
      for (uint32_t step = 0; step < 4; ++step)
        Fp8Products::multiply(accumulators, fragments + 4 * step,
                              uint64_t{count * 8} << 32 | (rows + step * 2 * count));
      cuda::ptx::wgmma_commit_group();
      if constexpr (kFull) read();
      cuda::ptx::wgmma_wait_group<0>();
      if constexpr (kFull) {
        ring.template copy<kDown>();
      } else if (has) {
        read();
        ring.template copy<kDown>();
      }
      rows += (count * 8) << warp.shift;
    };
    int32_t step = 0;
#pragma unroll 1
    for (; step < full; ++step) step_of.template operator()<true>(true);
#pragma unroll 1
    for (; step < steps; ++step) step_of.template operator()<false>(step < own_steps);
    cuda::ptx::pin(accumulators);
    const int32_t at = warp.own_columns();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = at % 2 == 0 ? accumulators[i] : accumulators[4 + i],
                  high = at % 2 == 0 ? accumulators[8 + i] : accumulators[12 + i];
      own[i] = at < 2 ? low : high;
    }
  }
};

// kColumns: tokens whose accumulators are kept: 1, 2 or 4.
template <cuda::Gemm1Function kFunction, int kColumns>
struct Fp8GateUp {
  using Base = DecodeGateUp<kFunction, Fp8Products>;
  static constexpr bool kGated = Base::kGated;
  static constexpr int kBatch = 8 / kColumns;      // groups between two barriers of the warps
  static constexpr int kPartials = 16 * kColumns;  // of a group and a warp
  static constexpr int kChannels = kGated ? 8 : 16;
  static_assert(2 * kDecodeWarps * kBatch * kPartials * 4 == kFp8GateUpPartialBytes);

  const Base base;
  const Fp8Share& share;
  float* partials;  // (2, 16 warps, kBatch, kPartials)

  __device__ void run(Fp8Stream& stream, const Fp8Columns& columns) const {
    const DecodeArgs& args = base.args;
    const auto lane = static_cast<int32_t>(threadIdx.x % 32),
               warp = static_cast<int32_t>(threadIdx.x / 32);
    const int32_t q = lane % 4, r = lane / 4;
    const int32_t warps_m = gate_up_warps_m(args), warps_k = 1 << args.gate_up_k_shift;
    const Fp8Warp of(args.gate_up_k_shift);
    const int32_t from_first = share.gate_up_m - of.first_m, to_last = of.last_m() - of.first_m;
    DecodeGroup at(args, share, share.first_group + share.gate_up_m);
    int buffer = 0;
    // all bounds are those of the warpgroup's first warp
#pragma unroll 1
    for (int32_t first = share.first_group + of.first_m; first < share.last_group;
         first += warps_m * kBatch) {
      DecodeGroup group = at;
      int32_t index = first;
#pragma unroll 1
      for (int i = 0; i < kBatch && index < share.last_group; ++i, index += warps_m) {
        float own[4];
        stream.multiply<false>(of, columns, args.k_tiles, index + from_first < share.last_group,
                               index + to_last < share.last_group, own);
        float* const to = partials + ((buffer * kDecodeWarps + warp) * kBatch + i) * kPartials;
        if constexpr (kColumns == 1) {
          if (q == 0) to[r] = own[0], to[r + 8] = own[2];
        } else if (q * 2 < kColumns) {
          float* const two = to + r * kColumns + q * 2;
          *reinterpret_cast<float2*>(two) = make_float2(own[0], own[1]);
          *reinterpret_cast<float2*>(two + 8 * kColumns) = make_float2(own[2], own[3]);
        }
        group.advance(args, share, warps_m);
      }
      if (warps_k == 1)
        __syncwarp();
      else
        cuda::ptx::named_barrier_sync(1 + share.gate_up_m, warps_k * 32);
      store_batch(at, first + from_first,
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
    const DecodeArgs& args = base.args;
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
      const int32_t assignment = base.routing.rows[group.active][token];
      if (assignment >= 0)
        base.store(group, group.group * kChannels + channel_of_group, token, assignment, gate, up);
    }
  }
};

struct Fp8Down {
  const DecodeDown<Fp8Products> base;
  const Fp8Share& share;
  uint8_t* x;  // the intermediate's columns

  // The cta's partials -> the rows' rounded values, in the space of the first partial. An
  // assignment without a row becomes -0, which adds nothing.
  __device__ void round_rows() const {
    const DecodeArgs& args = base.args;
    const Fp8DecodeRouting& routing = base.routing;
#pragma unroll 1
    for (auto i = static_cast<int32_t>(threadIdx.x); i < base.blocks() * base.rows * 16;
         i += kDecodeThreads) {
      int32_t assignment = i / 16, block = share.first_block;
      while (assignment >= base.rows) assignment -= base.rows, ++block;
      const int32_t channel = i % 16, active = routing.active_of[assignment];
      float* const at = base.partials_of(0, i / 16) + channel;
      float value = -0.0f;
      if (active >= 0) {
        float sum = at[0];
#pragma unroll 1
        for (int32_t warp_k = 1; warp_k < 1 << args.down_k_shift; ++warp_k) sum += at[warp_k * 16];
        const float bias =
            part_of(args, share, active)
                .down_biases.one(routing.expert_of[active],
                                 static_cast<uint32_t>(block * 16 + channel), args.hidden_size);
        value = base.rounded(
            fmaf(sum, routing.row_scales[assignment] * routing.scales[active].down, bias));
      }
      *at = value;
    }
  }

  __device__ void store(const float (&own)[4], const Fp8DownRow& of) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t q = lane % 4, r = lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t rank = base.routing.first_rank[of.active] + q * 2 + i;
      if (rank >= base.routing.first_rank[of.active + 1]) continue;
      float* const to =
          base.partials_of(of.block, base.routing.assignment_of[rank]) + share.down_k * 16;
      to[r] = own[i], to[r + 8] = own[2 + i];
    }
  }
  __device__ void run(Fp8Stream& stream) const {
    const DecodeArgs& args = base.args;
    const Fp8Warp of(args.down_k_shift);
#pragma unroll 1
    for (Fp8DownRow row(share, share.down_m); row.valid(share);
         row.advance(share, down_warps_m(args))) {
      float own[4];
      stream.multiply<true>(of, columns_of(args, base.routing, x, row.active),
                            part_of(args, share, row.active).down_k_tiles, true, true, own);
      store(own, row);
    }
    __syncthreads();
    round_rows();
    __syncthreads();
    base.combine();
  }
};

template <cuda::Gemm1Function kFunction, int kColumns>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    sm90_decode_fp8_kernel(const __grid_constant__ Fp8DecodeArgsOf<kFunction> args) {
  extern __shared__ __align__(128) uint8_t decode_shared[];
  __shared__ Fp8DecodeRouting routing;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  uint8_t* const table = decode_shared + kDecodeRingBytes;
  auto* const partials = reinterpret_cast<float*>(table + kFp8TableBytes);
  uint8_t* const x = table + kFp8TableBytes + args.partial_bytes;
  const Fp8Columns tokens{x, args.tokens};
  const int32_t routers = routing_warps(args);
  Fp8Hidden<kColumns == 1 ? 2 : 4> hidden(args, args.hidden_rule, routing, tokens, routers * 32);
  const auto with_hidden_type = [&](const auto& call) {
    switch (args.hidden_dtype) {
      case DType::kF32: call.template operator()<DType::kF32>(); break;
      case DType::kF16: call.template operator()<DType::kF16>(); break;
      default: call.template operator()<DType::kBf16>();
    }
  };
  cuda::ptx::grid_dependency_wait();
  cuda::ptx::launch_dependents();
  if (thread < routers * 32) {
    route_decode(args, routers, routing);
  } else {
    const uint32_t counter = read_grid_counter();
    with_hidden_type([&]<DType kType>() { hidden.template read<kType>(); });
    if (thread == kDecodeGridReader) routing.grid_before = counter;
  }
  __syncthreads();
  const Fp8Share share(args, routing.share);
  DecodeScales scales;
  if (thread < share.all_active) {
    const TensorScales& of = part_of(args, share, thread).tensor_scales[routing.expert_of[thread]];
    scales = {of.gate, of.up, of.down};
  }
  Fp8Ring ring(decode_shared, Fp8Subtiles(args, share, routing));
  ring.start();
  if (thread < share.all_active) routing.scales[thread] = scales;
  // This needs no weights, and the first ones are on their way.
  if (thread < 32)
    rank_rows(routing, share.all_active);
  else if (thread >= routers * 32)
    with_hidden_type([&]<DType kType>() { hidden.template quantize<kType>(); });
  fill_fp8_table(table);
  __syncthreads();
  if (blockIdx.x == 0 && thread == 0) {
    RunStatus status;
    status.bad_expert_ids = routing.bad_ids;
    status.nonfinite_weights = routing.nonfinite_weights;
    count_hidden(args, routing, status);
    *args.status = status;
  }
  Fp8Stream stream(ring, table);
  stream.read();
  ring.template copy<false>();
  Fp8GateUp<kFunction, kColumns>{{args, share, routing}, share, partials}.run(stream, tokens);
  __syncthreads();
  if (thread == 0) {
    arrive_at_grid(&decode_grid_counter);
    wait_for_grid(&decode_grid_counter, routing.grid_before);
  }
  __syncthreads();
  Fp8Intermediate(args, share, args.intermediate_rule, routing, x).quantize();
  cuda::ptx::fence_proxy_async_shared();
  __syncthreads();
  const auto routed = static_cast<int32_t>(args.ids.assignments);
  Fp8Down{
      {args, share, routing, partials, routed, routed + (args.shared.groups > 0 ? args.tokens : 0)},
      share,
      x}
      .run(stream);
}

}  // namespace nvfp4_moe::internal::sm90
