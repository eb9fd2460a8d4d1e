// A warp's share of the weights of the layer in one launch (decode.cuh), and its way to registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/address.cuh"
#include "backend/cuda/ptx/cp_async.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/sm90/decode_batch.cuh"
#include "backend/sm90/dequantize.cuh"

namespace nvfp4_moe::internal::sm90 {

// The work of a cta, and of this warp in it.
struct DecodeShare {
  int32_t active_experts, all_active;  // routed; with the shared expert
  int32_t first_group, last_group;     // of gate/up: [first, last)
  int32_t first_block, last_block;     // of 16 output channels
  int32_t gate_up_m, gate_up_k;        // of this warp, for gate/up
  int32_t down_m, down_k;

  __device__ DecodeShare(const DecodeArgs& args, int32_t routed) : active_experts(routed) {
    const auto warp = static_cast<int32_t>(threadIdx.x / 32),
               cta = static_cast<int32_t>(blockIdx.x);
    all_active = active_experts + (args.shared.groups > 0 ? 1 : 0);
    const int32_t groups = active_experts * args.routed.groups + args.shared.groups,
                  blocks = args.hidden_size / 16;
    first_group = args.by_ctas(groups * cta), last_group = args.by_ctas(groups * (cta + 1));
    first_block = args.by_ctas(blocks * cta), last_block = args.by_ctas(blocks * (cta + 1));
    gate_up_m = warp >> args.gate_up_k_shift, gate_up_k = warp & ((1 << args.gate_up_k_shift) - 1);
    down_m = warp >> args.down_k_shift, down_k = warp & ((1 << args.down_k_shift) - 1);
  }
};
__device__ inline int32_t gate_up_warps_m(const DecodeArgs& args) {
  return kDecodeWarps >> args.gate_up_k_shift;
}
__device__ inline int32_t down_warps_m(const DecodeArgs& args) {
  return kDecodeWarps >> args.down_k_shift;
}
__device__ inline const DecodePart& part_of(const DecodeArgs& args, const DecodeShare& share,
                                            int32_t active) {
  return active < share.active_experts ? args.routed : args.shared;
}

// A group of gate/up: 16 joined weight rows of an active expert.
struct DecodeGroup {
  int32_t active, group;

  __device__ DecodeGroup(const DecodeArgs& args, const DecodeShare& share, int32_t index) {
    active = min(args.by_groups(index), share.active_experts);
    group = index - active * args.routed.groups;
  }
  __device__ void advance(const DecodeArgs& args, const DecodeShare& share, int32_t by) {
    group += by;
    while (active < share.active_experts && group >= args.routed.groups)
      group -= args.routed.groups, ++active;
  }
};

// Goes through the subtiles of a warp: first those of gate/up, then those of down. A row of
// subtiles, `left` of them `step` bytes apart, has the same 16 weight rows. kEmptyRows: this warp
// may have none of a row's subtiles.
template <bool kEmptyRows = false>
struct DecodeSubtiles {
  const DecodeArgs& args;
  const DecodeShare& share;
  const DecodeRouting& routing;
  DecodeGroup group;
  int32_t group_index, block, active;  // of the next row of subtiles
  const uint8_t* at;                   // codes of the next subtile
  int32_t left, step, scales_at;

  __device__ DecodeSubtiles(const DecodeArgs& args_, const DecodeShare& share_,
                            const DecodeRouting& routing_)
      : args(args_),
        share(share_),
        routing(routing_),
        group(args, share, share.first_group + share.gate_up_m),
        group_index(share.first_group + share.gate_up_m),
        block(share.first_block),
        active(share.down_m) {
    next_row<false>();
  }
  // Begins the next row; left = 0 at the end. kDown: no row of gate/up is left.
  template <bool kDown>
  __device__ void next_row() {
    if constexpr (kEmptyRows)
      while (begin_next<kDown>() && left == 0) {
      }
    else
      begin_next<kDown>();
  }
  // Returns false at the end.
  template <bool kDown>
  __device__ bool begin_next() {
    left = 0;
    if (!kDown && group_index < share.last_group) {
      const DecodePart& part = part_of(args, share, group.active);
      begin(part.weights + routing.expert_of[group.active] * part.expert_stride, group.group,
            args.k_tiles, share.gate_up_k, args.gate_up_k_shift);
      group_index += gate_up_warps_m(args);
      group.advance(args, share, gate_up_warps_m(args));
      return true;
    }
    if (active >= share.all_active) {
      if (share.down_m >= share.all_active) return false;
      ++block, active = share.down_m;
    }
    if (block >= share.last_block) return false;
    const DecodePart& part = part_of(args, share, active);
    begin(part.weights + routing.expert_of[active] * part.expert_stride + part.down_offset, block,
          part.down_k_tiles, share.down_k, args.down_k_shift);
    active += down_warps_m(args);
    return true;
  }
  __device__ void begin(const uint8_t* matrix, int32_t group, int32_t k_tiles, int32_t warp_k,
                        int32_t shift) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    at = matrix + int64_t{(group >> 3) * k_tiles + warp_k} * cuda::kTileBytes + (group & 7) * 1024 +
         lane * 16;
    scales_at = static_cast<int32_t>(cuda::kTileCodeBytes) - (group & 7) * (1024 - 128) - lane * 12;
    left = (k_tiles - warp_k + (1 << shift) - 1) >> shift;
    step = static_cast<int32_t>(cuda::kTileBytes) << shift;
  }
};

// A warp's ring of subtiles in shared memory. Each lane copies the codes that it reads itself;
// lanes share the scales.
template <bool kEmptyRows = false>
struct DecodeRing {
  uint32_t first, lane_codes,
      lane_scales;  // shared addresses: the ring, and within the first subtile
  uint32_t slot = 0;
  DecodeSubtiles<kEmptyRows> subtiles;

  __device__ DecodeRing(const uint8_t* rings, const DecodeSubtiles<kEmptyRows>& subtiles_)
      : first(cuda::ptx::shared_address(rings) +
              threadIdx.x / 32 * (kDecodeDepth * kDecodeSubtileBytes)),
        lane_codes(first + threadIdx.x % 32 * 16),
        lane_scales(first + 1024 + threadIdx.x % 32 / 4 * 8),
        subtiles(subtiles_) {}
  // Starts the copy of the next subtile, if there is one, into the slot.
  template <bool kDown>
  __device__ void copy() {
    if (subtiles.left > 0) {
      const uint8_t* const codes = subtiles.at;
      cuda::ptx::cp_async_16(lane_codes + slot, codes);
      cuda::ptx::cp_async_16(lane_codes + slot + 512, codes + 512);
      cuda::ptx::cp_async_4(first + slot + 1024 + threadIdx.x % 32 * 4, codes + subtiles.scales_at);
      subtiles.at += subtiles.step;
      if (--subtiles.left == 0) subtiles.template next_row<kDown>();
    }
    cuda::ptx::cp_async_commit_group();
    slot = slot == (kDecodeDepth - 1) * kDecodeSubtileBytes ? 0 : slot + kDecodeSubtileBytes;
  }
  __device__ void start() {
#pragma unroll 1
    for (uint32_t i = 0; i < kDecodeDepth; ++i) copy<false>();
  }
  // Waits for the oldest subtile, reads it, and starts the copy of the next one into its slot.
  template <bool kDown>
  __device__ void take(Bf16Products::Weights (&weights)[2]) {
    cuda::ptx::cp_async_wait_group<kDecodeDepth - 1>();
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 codes = load_shared_16(lane_codes + slot + half * 512);
      const uint2 scales = load_shared_8(lane_scales + slot + half * 64);
      weights[half].codes[0] = codes.x, weights[half].codes[1] = codes.y;
      weights[half].codes[2] = codes.z, weights[half].codes[3] = codes.w;
      weights[half].scales[0] = scales.x, weights[half].scales[1] = scales.y;
    }
    __syncwarp();
    copy<kDown>();
  }
  __device__ static uint4 load_shared_16(uint32_t from) {
    uint4 to;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "r"(from)
                 : "memory");
    return to;
  }
  __device__ static uint2 load_shared_8(uint32_t from) {
    uint2 to;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(to.x), "=r"(to.y) : "r"(from) : "memory");
    return to;
  }
};

// Activations of a subtile for one lane: two k16 steps in each vector.
struct DecodeColumns {
  uint4 words[4];
};

// Two chains of accumulators: rows r and r + 8 of the weights, tokens 2q and 2q + 1.
struct DecodeAccumulators {
  float chains[2][4] = {};

  __device__ void multiply(const Bf16Products::Weights (&weights)[2], const DecodeColumns& columns,
                           const Bf16Products::Constants& constants) {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      uint32_t fragment[4];
      Bf16Products::dequantize(weights[step / 4], step % 4, constants, fragment);
      const uint4& words = columns.words[step / 2];
      cuda::mma_bf16(chains[step % 2], fragment, step % 2 == 0 ? words.x : words.z,
                     step % 2 == 0 ? words.y : words.w);
    }
  }
  __device__ float at(int i) const { return chains[0][i] + chains[1][i]; }
};

}  // namespace nvfp4_moe::internal::sm90
