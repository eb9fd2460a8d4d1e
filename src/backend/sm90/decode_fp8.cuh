// The layer of a few tokens in one launch (decode.cuh) with E4M3 activations (W4A8).
//
// Hopper multiplies E4M3 by wgmma only, so the four warps of a warpgroup multiply together: they
// have the same 16 weight rows and share K, each with a subtile of its own, from its own ring. For
// that a product has 32 columns: the j-th eight of them are the activations j tiles further, which
// the descriptor's stride gives without a copy, and warp j keeps those.
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
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/sm90/decode_down.cuh"
#include "backend/sm90/decode_fp8_rows.cuh"
#include "backend/sm90/decode_gate_up.cuh"

namespace nvfp4_moe::internal::sm90 {

template <cuda::Gemm1Function kFunction>
struct Fp8DecodeArgsOf : DecodeArgsOf<kFunction> {
  cuda::Divider by_vec8s;  // of a row of hidden, with padding
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

using Fp8Ring = DecodeRing<kFp8Together>;

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
                   : "r"(ring.first + ring.slot + 1024 + half * 64 + threadIdx.x % 32 * 2)
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

  // Steps [first, last) of a row of subtiles times the columns, this warp's part of K. own: rows r
  // and r + 8, columns 2q and 2q + 1.
  template <bool kDown>
  __device__ void multiply(const Fp8Columns& columns, int32_t k_tiles, int32_t first, int32_t last,
                           float (&own)[4]) {
    float accumulators[16] = {};
    const auto count = static_cast<uint32_t>(columns.count);
    // The descriptor counts in 16 bytes: from a run to the next, from a tile to the next.
    uint32_t rows = (cuda::ptx::shared_address(columns.at) >> 4) +
                    static_cast<uint32_t>(first * kFp8Together) * count * 8 + (count << 16);
    const int32_t warp = static_cast<int32_t>(threadIdx.x / 32) % kFp8Together,
                  full = min(k_tiles / kFp8Together, last);
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
      rows += count * 8 * kFp8Together;
    };
    int32_t step = first;
#pragma unroll 1
    for (; step < full; ++step) step_of.template operator()<true>(true);
    // a row's last step may have fewer subtiles than warps
    if (step < last) step_of.template operator()<false>(step * kFp8Together + warp < k_tiles);
    cuda::ptx::pin(accumulators);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = warp % 2 == 0 ? accumulators[i] : accumulators[4 + i],
                  high = warp % 2 == 0 ? accumulators[8 + i] : accumulators[12 + i];
      own[i] = warp < 2 ? low : high;
    }
  }
};

// The partials of a warpgroup's rows: those of a row that an earlier run has begun, and in turn two
// sets of slots for the other rows.
struct Fp8Partials {
  DecodePartials partials;
  int32_t row = 0;  // counts the latter

  __device__ static int32_t warp() { return static_cast<int32_t>(threadIdx.x / 32); }
  __device__ int32_t slot(int32_t warp) const { return (1 + row % 2) * kDecodeWarps + warp; }
  __device__ void put_begun_before(const float (&own)[4]) const { partials.put(warp(), own); }
  __device__ void put(const float (&own)[4]) const { partials.put(slot(warp()), own); }
  // Waits for the warpgroup's partials of this row. Returns whether this warp adds them: the warps
  // take turns.
  __device__ bool meet() const {
    cuda::ptx::named_barrier_sync<kFp8Together * 32>(1 + warp() / kFp8Together);
    return adds();
  }
  __device__ bool adds() const { return warp() % kFp8Together == row % kFp8Together; }
  __device__ void sum(float (&to)[4]) const {
#pragma unroll
    for (float& value : to) value = 0;
#pragma unroll
    for (int32_t i = 0; i < kFp8Together; ++i)
      partials.add(slot(warp() / kFp8Together * kFp8Together + i), to);
  }
};

template <cuda::Gemm1Function kFunction>
struct Fp8GateUp {
  using Base = DecodeGateUp<kFunction, Fp8Products>;
  const Base base;

  __device__ void run(Fp8Stream& stream, const Fp8Columns& columns) const {
    const DecodeArgs& args = base.args;
    const DecodeShare& share = base.share;
    const int32_t steps = decode_steps<kFp8Together>(args.k_tiles);
    DecodeRows rows(share.gate_up);
    int32_t missing = 0;
    Fp8Partials partials{base.partials};
    float sums[4];
#pragma unroll 1
    while (rows.more()) {
      const int32_t end = rows.end(steps);
      stream.multiply<false>(columns, args.k_tiles, rows.step, end, sums);
      if (rows.step > 0) {
        partials.put_begun_before(sums);
      } else {
        partials.put(sums);
        missing = steps - end;
        if (missing > 0) break;
        if (partials.meet()) {
          partials.sum(sums);
          base.store(rows.row, sums);
        }
        ++partials.row;
      }
      rows.advance(share.gate_up, end);
    }
    __syncthreads();
    if (missing == 0 || !partials.adds()) return;
    partials.sum(sums);
    base.partials.template add_rest<kFp8Together>(share.gate_up, missing, sums);
    base.store(rows.row, sums);
  }
};

struct Fp8Down {
  using Base = DecodeDown<Fp8Products>;
  const Base base;

  __device__ void store(const float (&sums)[4], int buffer, int32_t active) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t q = lane % 4, r = lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t rank = base.routing.first_rank[active] + q * 2 + i;
      if (rank >= base.routing.first_rank[active + 1]) continue;
      float* const to = base.value_of(buffer, base.routing.assignment_of[rank]);
      to[r] = sums[i], to[r + 8] = sums[2 + i];
    }
  }
  __device__ void run(Fp8Stream& stream) const {
    const DecodeArgs& args = base.args;
    const DecodeShare& share = base.share;
    Fp8Partials partials{base.partials};
    int buffer = 0;
#pragma unroll 1
    for (int32_t block = share.first_block; block < share.last_block; ++block, buffer ^= 1) {
      DecodeRows experts(share.down);
      int32_t missing = 0;
      float sums[4];
#pragma unroll 1
      while (experts.more()) {
        const int32_t active = experts.row, k_tiles = part_of(args, share, active).down_k_tiles,
                      steps = decode_steps<kFp8Together>(k_tiles), end = experts.end(steps);
        stream.multiply<true>(columns_of(args, base.routing, base.x, active), k_tiles, experts.step,
                              end, sums);
        if (experts.step > 0) {
          partials.put_begun_before(sums);
        } else {
          partials.put(sums);
          missing = steps - end;
          if (missing > 0) break;
          if (partials.meet()) {
            partials.sum(sums);
            store(sums, buffer, active);
          }
          ++partials.row;
        }
        experts.advance(share.down, end);
      }
      __syncthreads();
      if (missing > 0 && partials.adds()) {
        partials.sum(sums);
        base.partials.add_rest<kFp8Together>(share.down, missing, sums);
        store(sums, buffer, experts.row);
      }
      __syncthreads();
      base.finish(buffer, block);
    }
  }
};

template <cuda::Gemm1Function kFunction>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    sm90_decode_fp8_kernel(const __grid_constant__ Fp8DecodeArgsOf<kFunction> args) {
  extern __shared__ __align__(128) uint8_t decode_shared[];
  __shared__ Fp8DecodeRouting routing;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  uint8_t* const table = decode_shared + kDecodeRingBytes;
  const DecodePartials partials{reinterpret_cast<float4*>(table + kFp8TableBytes)};
  uint8_t* const x = table + kFp8TableBytes + args.partial_bytes;
  const Fp8Columns tokens{x, args.tokens};
  fill_fp8_table(table);
  cuda::ptx::prefetch_parameters(args);
  cuda::ptx::grid_dependency_wait();
  cuda::ptx::launch_dependents();
  if (thread < 32) {
    if (args.ids.assignments <= 32)
      route_decode<1>(args, routing);
    else
      route_decode<kDecodeAssignments / 32>(args, routing);
  } else {
    const auto quantize = [&]<DType kType>() {
      quantize_hidden<kType>(args, args.by_vec8s, args.hidden_rule, routing, tokens);
    };
    switch (args.hidden_dtype) {
      case DType::kF32: quantize.template operator()<DType::kF32>(); break;
      case DType::kF16: quantize.template operator()<DType::kF16>(); break;
      default: quantize.template operator()<DType::kBf16>();
    }
  }
  __syncthreads();
  const DecodeShare share = DecodeShare::of<kFp8Together>(args, routing.active_experts);
  DecodeScales scales;
  if (thread < share.all_active) {
    const TensorScales& of = part_of(args, share, thread).tensor_scales[routing.expert_of[thread]];
    scales = {of.gate, of.up, of.down};
  }
  Fp8Ring ring(decode_shared, DecodeSubtiles<kFp8Together>(args, share, routing));
  ring.start();
  if (thread < share.all_active) routing.scales[thread] = scales;
  if (thread < 32) {
    rank_rows(routing, share.all_active);
  } else if (blockIdx.x == 0 && thread == 32) {
    RunStatus status;
    status.bad_expert_ids = routing.bad_ids;
    status.nonfinite_weights = routing.nonfinite_weights;
    count_hidden(args, routing, status);
    *args.status = status;
  }
  Fp8Stream stream(ring, table);
  stream.read();
  ring.template copy<false>();
  __syncthreads();
  Fp8GateUp<kFunction>{{args, share, routing, partials}}.run(stream, tokens);
  __syncthreads();
  if (thread == 0) wait_for_grid(&decode_grid_counter);
  __syncthreads();
  Fp8Intermediate(args, share, args.intermediate_rule, routing, x).quantize();
  cuda::ptx::fence_proxy_async_shared();
  __syncthreads();
  const auto routed = static_cast<int32_t>(args.ids.assignments);
  Fp8Down{{args, share, routing, x, partials,
           reinterpret_cast<float*>(table + kFp8TableBytes + 3 * kDecodePartialBytes), routed,
           routed + (args.shared.groups > 0 ? args.tokens : 0)}}
      .run(stream);
}

}  // namespace nvfp4_moe::internal::sm90
