// A warp's share of the weights of the layer in one launch with E4M3 activations (decode_fp8.cuh):
// a power of two of the warps share a row of subtiles along K.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/sm90/decode_weights.cuh"

namespace nvfp4_moe::internal::sm90 {

// The work of a cta, and of this warp in it.
struct Fp8Share : DecodeShare {
  int32_t gate_up_m, gate_up_k;  // of this warp, for gate/up
  int32_t down_m, down_k;

  __device__ Fp8Share(const DecodeArgs& args, const DecodeShare& of_cta) : DecodeShare(of_cta) {
    const auto warp = static_cast<int32_t>(threadIdx.x / 32);
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

// The rows of subtiles of a warp, and how the warps of its warpgroup share them along K.
struct Fp8Warp {
  int32_t first_m;    // row of the warpgroup's first warp; that of this warp is share.*_m
  int32_t k, k_warp;  // the warpgroup's first subtile along K, and this warp's
  int32_t shift;      // log2 of the warps that share a row

  __device__ Fp8Warp(int32_t k_shift) : shift(k_shift) {
    const auto warp = static_cast<int32_t>(threadIdx.x / 32);
    first_m = (warp & ~3) >> shift;
    k_warp = warp & ((1 << shift) - 1);
    k = k_warp & ~3;
  }
  __device__ int32_t last_m() const { return first_m + (3 >> shift); }
  // Which eight columns of a product belong to this warp.
  __device__ int32_t own_columns() const { return k_warp & 3; }
  // Subtiles of a warp along K, from the given one on.
  __device__ int32_t steps(int32_t k_tiles, int32_t from) const {
    return max((k_tiles - from + (1 << shift) - 1) >> shift, 0);
  }
};

// A row of down's subtiles: 16 output channels of an active expert. The rows of a cta are those of
// its first block, then of the next one.
struct Fp8DownRow {
  int32_t block, active;  // block: from the cta's first one

  __device__ Fp8DownRow(const DecodeShare& share, int32_t row) : block(0), active(row) {
    carry(share);
  }
  __device__ bool valid(const DecodeShare& share) const {
    return block < share.last_block - share.first_block;
  }
  __device__ void advance(const DecodeShare& share, int32_t by) {
    active += by;
    carry(share);
  }
  __device__ void carry(const DecodeShare& share) {
    while (active >= share.all_active && valid(share)) active -= share.all_active, ++block;
  }
};

// Goes through the subtiles of a warp: first those of gate/up, then those of down. A row of
// subtiles, `left` of them `step` bytes apart, has the same 16 weight rows. Down has four warps or
// more along K, so this warp may have none of a row's subtiles.
struct Fp8Subtiles {
  const DecodeArgs& args;
  const Fp8Share& share;
  const DecodeRouting& routing;
  DecodeGroup group;
  int32_t group_index;  // the next row of gate/up
  Fp8DownRow down;      // the next row of down
  const uint8_t* at;    // the next subtile's codes
  int32_t left = 0, step, scales_at;

  __device__ Fp8Subtiles(const DecodeArgs& args_, const Fp8Share& share_,
                         const DecodeRouting& routing_)
      : args(args_),
        share(share_),
        routing(routing_),
        group(args, share, share.first_group + share.gate_up_m),
        group_index(share.first_group + share.gate_up_m),
        down(share, share.down_m) {}
  // Where a lane's scale indices are among those of a subtile.
  __device__ static uint32_t scales_of(uint32_t lane) { return lane * 2; }
  // Begins the next row, once none of this one is left; false at the end. kDown: no row of gate/up
  // is left.
  template <bool kDown>
  __device__ bool next_row() {
    while (begin_next<kDown>())
      if (left > 0) return true;
    return false;
  }
  // Returns false at the end.
  template <bool kDown>
  __device__ bool begin_next() {
    if (!kDown && group_index < share.last_group) {
      const DecodePart& part = part_of(args, share, group.active);
      begin(part.weights + routing.expert_of[group.active] * part.expert_stride, group.group,
            args.k_tiles, share.gate_up_k, args.gate_up_k_shift);
      group_index += gate_up_warps_m(args);
      group.advance(args, share, gate_up_warps_m(args));
      return true;
    }
    if (!down.valid(share)) return false;
    const DecodePart& part = part_of(args, share, down.active);
    begin(part.weights + routing.expert_of[down.active] * part.expert_stride + part.down_offset,
          share.first_block + down.block, part.down_k_tiles, share.down_k, args.down_k_shift);
    down.advance(share, down_warps_m(args));
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

using Fp8Ring = DecodeRing<Fp8Subtiles>;

}  // namespace nvfp4_moe::internal::sm90
