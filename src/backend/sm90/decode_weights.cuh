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

// A row of subtiles has the same 16 weight rows and follows its matrix along K. A step of a row is
// one subtile of each warp that multiplies together: one warp's, or under fp8 those of a
// warpgroup's four warps, which are consecutive along K.
template <int kTogether>
__device__ constexpr int32_t decode_steps(int32_t k_tiles) {
  return (k_tiles + kTogether - 1) / kTogether;
}

// This warp's (warpgroup's) share of the rows of a phase. Each has the same number of whole rows,
// in turn. The steps of the rest, one row after the other, are divided into equal runs, so that a
// row may begin in one run and end in a later one.
struct DecodeRun {
  int32_t own, shift;             // which share this is; log2 of the number of shares
  int32_t whole;                  // rows: own, own + shares, ...
  int32_t all, first, last;       // steps of the rest; of this run: [first, last)
  int32_t first_row, first_step;  // the row in which the run begins, and its first step of that row

  // rows: of `steps` steps each, followed by one of `more` steps.
  __device__ DecodeRun(int32_t rows, int32_t steps, int32_t more, const cuda::Divider& by_steps,
                       int32_t shift_)
      : own(static_cast<int32_t>(threadIdx.x / 32) >> (kDecodeWarpsShift - shift_)),
        shift(shift_),
        whole(rows >> shift) {
    const int32_t rest = rows - (whole << shift);
    all = rest * steps + more;
    first = begin(own), last = begin(own + 1);
    const int32_t row = min(by_steps(first), rest);
    first_row = (whole << shift) + row, first_step = first - row * steps;
  }
  __device__ int32_t begin(int32_t share) const { return all * share >> shift; }
};

// Goes through the rows of a share.
struct DecodeRows {
  int32_t row, step;     // the row, and the first of its steps that belongs to the share
  int32_t whole, steps;  // from this row on: whole rows, steps of the run

  __device__ explicit DecodeRows(const DecodeRun& run)
      : row(run.own), step(0), whole(run.whole), steps(run.last - run.first) {
    if (whole == 0) begin_run(run);
  }
  __device__ bool more() const { return (whole | steps) != 0; }
  // The end of the row's steps that belong to the share.
  __device__ int32_t end(int32_t steps_of_row) const {
    return whole > 0 ? steps_of_row : min(step + steps, steps_of_row);
  }
  __device__ void advance(const DecodeRun& run, int32_t end) {
    if (whole > 0) {
      row += 1 << run.shift;
      if (--whole == 0) begin_run(run);
      return;
    }
    steps -= end - step;
    ++row, step = 0;
  }
  __device__ void begin_run(const DecodeRun& run) { row = run.first_row, step = run.first_step; }
};

// The work of a cta, and of this warp in it.
struct DecodeShare {
  int32_t active_experts, all_active;  // routed; with the shared expert
  int32_t first_group;                 // of gate/up
  int32_t first_block, last_block;     // of 16 output channels: [first, last)
  DecodeRun gate_up, down;             // rows: groups; active experts, for each block

  template <int kTogether>
  __device__ static DecodeShare of(const DecodeArgs& args, int32_t routed) {
    constexpr int32_t kShift = kTogether == 1 ? kDecodeWarpsShift : kDecodeWarpsShift - 2;
    static_assert(kTogether == 1 || kTogether == 4);
    const auto cta = static_cast<int32_t>(blockIdx.x);
    const bool has_shared = args.shared.groups > 0;
    const int32_t groups = routed * args.routed.groups + args.shared.groups,
                  blocks = args.hidden_size / 16, first_group = args.by_ctas(groups * cta);
    return {routed,
            routed + (has_shared ? 1 : 0),
            first_group,
            args.by_ctas(blocks * cta),
            args.by_ctas(blocks * (cta + 1)),
            {args.by_ctas(groups * (cta + 1)) - first_group, decode_steps<kTogether>(args.k_tiles),
             0, args.by_gate_up_steps, kShift},
            {routed, decode_steps<kTogether>(args.routed.down_k_tiles),
             has_shared ? decode_steps<kTogether>(args.shared.down_k_tiles) : 0, args.by_down_steps,
             kShift}};
  }
};
__device__ inline const DecodePart& part_of(const DecodeArgs& args, const DecodeShare& share,
                                            int32_t active) {
  return active < share.active_experts ? args.routed : args.shared;
}

// A group of gate/up: 16 joined weight rows of an active expert. row: which of the cta's groups.
struct DecodeGroup {
  int32_t active, group;

  __device__ DecodeGroup(const DecodeArgs& args, const DecodeShare& share, int32_t row) {
    const int32_t index = share.first_group + row;
    active = min(args.by_groups(index), share.active_experts);
    group = index - active * args.routed.groups;
  }
};

// Goes through the subtiles of a warp: its share of gate/up, then its share of each block of down.
template <int kTogether>
struct DecodeSubtiles {
  const DecodeArgs& args;
  const DecodeShare& share;
  const DecodeRouting& routing;
  DecodeRows rows;          // from the next one on
  int32_t block;            // of down; before the first one in gate/up
  const uint8_t* at;        // codes of the next subtile
  int32_t left, scales_at;  // subtiles of the row that are left

  __device__ DecodeSubtiles(const DecodeArgs& args_, const DecodeShare& share_,
                            const DecodeRouting& routing_)
      : args(args_),
        share(share_),
        routing(routing_),
        rows(share.gate_up),
        block(share.first_block - 1) {
    next_row<false>();
  }
  // Begins the next row; left = 0 at the end. kDown: no row of gate/up is left.
  template <bool kDown>
  __device__ void next_row() {
    do {
      left = 0;
      if (!rows.more()) {
        rows = DecodeRows(share.down);
        if (++block >= share.last_block || !rows.more()) return;
      }
      if (!kDown && block < share.first_block) {
        const DecodeGroup group(args, share, rows.row);
        const DecodePart& part = part_of(args, share, group.active);
        begin(share.gate_up, part.weights + routing.expert_of[group.active] * part.expert_stride,
              group.group, args.k_tiles);
      } else {
        const DecodePart& part = part_of(args, share, rows.row);
        begin(share.down,
              part.weights + routing.expert_of[rows.row] * part.expert_stride + part.down_offset,
              block, part.down_k_tiles);
      }
    } while (kTogether > 1 && left == 0);
  }
  __device__ void begin(const DecodeRun& run, const uint8_t* matrix, int32_t group,
                        int32_t k_tiles) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32),
               offset = static_cast<int32_t>(threadIdx.x / 32) % kTogether;
    const int32_t end = rows.end(decode_steps<kTogether>(k_tiles)),
                  k_tile = rows.step * kTogether + offset;
    at = matrix + int64_t{(group >> 3) * k_tiles + k_tile} * cuda::kTileBytes + (group & 7) * 1024 +
         lane * 16;
    scales_at = static_cast<int32_t>(cuda::kTileCodeBytes) - (group & 7) * (1024 - 128) - lane * 12;
    left = end - rows.step;
    // the last step of a row may have no subtile of this warp
    if (kTogether > 1 && (end - 1) * kTogether + offset >= k_tiles) --left;
    rows.advance(run, end);
  }
};

// Partial accumulators of a row in shared memory: a slot for each warp, in the order of fragments.
struct DecodePartials {
  float4* slots;

  __device__ void put(int32_t slot, const float (&values)[4]) const {
    slots[slot * 32 + threadIdx.x % 32] = make_float4(values[0], values[1], values[2], values[3]);
  }
  __device__ void add(int32_t slot, float (&to)[4]) const {
    const float4 values = slots[slot * 32 + threadIdx.x % 32];
    to[0] += values.x, to[1] += values.y, to[2] += values.z, to[3] += values.w;
  }
  // Adds the partials of the later runs that go on with the row of this run's last step. missing:
  // steps of that row after this run. A run that begins within a row has stored its partials.
  template <int kTogether>
  __device__ void add_rest(const DecodeRun& run, int32_t missing, float (&to)[4]) const {
    const int32_t end = run.last + missing;
    int32_t next = run.own + 1;
#pragma unroll 1
    for (int32_t begin = run.last; begin < end; ++next) {
      const int32_t after = run.begin(next + 1);
      if (after == begin) continue;  // an empty run
#pragma unroll
      for (int32_t i = 0; i < kTogether; ++i) add(next * kTogether + i, to);
      begin = after;
    }
  }
};

// A warp's ring of subtiles in shared memory. Each lane copies the codes that it reads itself;
// lanes share the scales.
template <int kTogether>
struct DecodeRing {
  uint32_t first, lane_codes,
      lane_scales;  // shared addresses: the ring, and within the first subtile
  uint32_t slot = 0;
  DecodeSubtiles<kTogether> subtiles;

  __device__ DecodeRing(const uint8_t* rings, const DecodeSubtiles<kTogether>& subtiles_)
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
      subtiles.at += cuda::kTileBytes * kTogether;
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
  __device__ void sum(float (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = chains[0][i] + chains[1][i];
  }
};

}  // namespace nvfp4_moe::internal::sm90
