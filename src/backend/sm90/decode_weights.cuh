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
  int32_t places, all_places;       // routed; with the shared expert
  int32_t first_unit, last_unit;    // of gate/up: [first, last)
  int32_t first_block, last_block;  // of 16 output channels
  int32_t unit_team, unit_member;   // of this warp, for gate/up
  int32_t down_team, down_member;

  __device__ DecodeShare(const DecodeArgs& args, int32_t routed_places) : places(routed_places) {
    const auto warp = static_cast<int32_t>(threadIdx.x / 32),
               cta = static_cast<int32_t>(blockIdx.x);
    all_places = places + (args.shared.units > 0 ? 1 : 0);
    const int32_t units = places * args.routed.units + args.shared.units,
                  blocks = args.hidden_size / 16;
    first_unit = args.by_ctas(units * cta), last_unit = args.by_ctas(units * (cta + 1));
    first_block = args.by_ctas(blocks * cta), last_block = args.by_ctas(blocks * (cta + 1));
    unit_team = warp >> args.unit_shift, unit_member = warp & ((1 << args.unit_shift) - 1);
    down_team = warp >> args.down_shift, down_member = warp & ((1 << args.down_shift) - 1);
  }
};
__device__ inline int32_t unit_teams(const DecodeArgs& args) {
  return kDecodeWarps >> args.unit_shift;
}
__device__ inline int32_t down_teams(const DecodeArgs& args) {
  return kDecodeWarps >> args.down_shift;
}
__device__ inline const DecodePart& part_of(const DecodeArgs& args, const DecodeShare& share,
                                            int32_t place) {
  return place < share.places ? args.routed : args.shared;
}

// A unit of gate/up: 16 joined weight rows of a place.
struct DecodeUnit {
  int32_t place, unit;

  __device__ DecodeUnit(const DecodeArgs& args, const DecodeShare& share, int32_t index) {
    place = min(args.by_units(index), share.places);
    unit = index - place * args.routed.units;
  }
  __device__ void advance(const DecodeArgs& args, const DecodeShare& share, int32_t by) {
    unit += by;
    while (place < share.places && unit >= args.routed.units) unit -= args.routed.units, ++place;
  }
};

// Goes through the pieces of a warp: first those of gate/up, then those of down. A row of pieces,
// `left` of them `step` bytes apart, has the same 16 weight rows.
struct DecodePieces {
  const DecodeArgs& args;
  const DecodeShare& share;
  const DecodeRouting& routing;
  DecodeUnit unit;
  int32_t unit_index, block, place;  // of the next row of pieces
  const uint8_t* at;                 // codes of the next piece
  int32_t left, step, scales_at;

  __device__ DecodePieces(const DecodeArgs& args_, const DecodeShare& share_,
                          const DecodeRouting& routing_)
      : args(args_),
        share(share_),
        routing(routing_),
        unit(args, share, share.first_unit + share.unit_team),
        unit_index(share.first_unit + share.unit_team),
        block(share.first_block),
        place(share.down_team) {
    next_row<false>();
  }
  // Begins the next row; left = 0 at the end. kDown: no row of gate/up is left.
  template <bool kDown>
  __device__ void next_row() {
    left = 0;
    if (!kDown && unit_index < share.last_unit) {
      const DecodePart& part = part_of(args, share, unit.place);
      begin(part.weights + routing.place_experts[unit.place] * part.expert_stride, unit.unit,
            args.k_tiles, share.unit_member, args.unit_shift);
      unit_index += unit_teams(args);
      unit.advance(args, share, unit_teams(args));
      return;
    }
    if (place >= share.all_places) {
      if (share.down_team >= share.all_places) return;
      ++block, place = share.down_team;
    }
    if (block >= share.last_block) return;
    const DecodePart& part = part_of(args, share, place);
    begin(part.weights + routing.place_experts[place] * part.expert_stride + part.down_offset,
          block, part.down_k_tiles, share.down_member, args.down_shift);
    place += down_teams(args);
  }
  __device__ void begin(const uint8_t* matrix, int32_t group, int32_t k_tiles, int32_t member,
                        int32_t shift) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    at = matrix + int64_t{(group >> 3) * k_tiles + member} * cuda::kTileBytes + (group & 7) * 1024 +
         lane * 16;
    scales_at = static_cast<int32_t>(cuda::kTileCodeBytes) - (group & 7) * (1024 - 128) - lane * 12;
    left = (k_tiles - member + (1 << shift) - 1) >> shift;
    step = static_cast<int32_t>(cuda::kTileBytes) << shift;
  }
};

// A warp's ring of pieces in shared memory. Each lane copies the codes that it reads itself; lanes
// share the scales.
struct DecodeRing {
  uint32_t first, lane_codes,
      lane_scales;  // shared addresses: the ring, and within the first piece
  uint32_t slot = 0;
  DecodePieces pieces;

  __device__ DecodeRing(const uint8_t* rings, const DecodePieces& pieces_)
      : first(cuda::ptx::shared_address(rings) +
              threadIdx.x / 32 * (kDecodeDepth * kDecodePieceBytes)),
        lane_codes(first + threadIdx.x % 32 * 16),
        lane_scales(first + 1024 + threadIdx.x % 32 / 4 * 8),
        pieces(pieces_) {}
  // Starts the copy of the next piece, if there is one, into the slot.
  template <bool kDown>
  __device__ void copy() {
    if (pieces.left > 0) {
      const uint8_t* const codes = pieces.at;
      cuda::ptx::cp_async_16(lane_codes + slot, codes);
      cuda::ptx::cp_async_16(lane_codes + slot + 512, codes + 512);
      cuda::ptx::cp_async_4(first + slot + 1024 + threadIdx.x % 32 * 4, codes + pieces.scales_at);
      pieces.at += pieces.step;
      if (--pieces.left == 0) pieces.template next_row<kDown>();
    }
    cuda::ptx::cp_async_commit_group();
    slot = slot == (kDecodeDepth - 1) * kDecodePieceBytes ? 0 : slot + kDecodePieceBytes;
  }
  __device__ void start() {
#pragma unroll 1
    for (uint32_t i = 0; i < kDecodeDepth; ++i) copy<false>();
  }
  // Waits for the oldest piece, reads it, and starts the copy of the next one into its place.
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

// Activations of a piece for one lane: two k16 steps in each vector.
struct DecodeColumns {
  uint4 words[4];
};

// Two chains of accumulators: rows r and r + 8 of the weights, tokens 2q and 2q + 1.
struct DecodeSums {
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
