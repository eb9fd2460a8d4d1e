// A warp's share of the weights of the layer in one launch (decode.cuh), and its way to registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/address.cuh"
#include "backend/cuda/ptx/cp_async.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/sm90/decode_batch.cuh"
#include "backend/sm90/decode_runs.h"
#include "backend/sm90/dequantize.cuh"

namespace nvfp4_moe::internal::sm90 {

// Divides the subtiles of a cta among its warps. Called by one warp, which has a lane for each run:
// 16 of gate/up, 16 of down.
template <cuda::Gemm1Function kFunction>
__device__ void divide_subtiles(const Bf16DecodeArgsOf<kFunction>& args, Bf16DecodeRouting& to) {
  static_assert(2 * kDecodeWarps == 32);
  const DecodeShare share = to.share;
  const auto lane = static_cast<int32_t>(threadIdx.x);
  const bool down = lane >= kDecodeWarps;
  const int32_t blocks = share.last_block - share.first_block;
  const DecodeRun run(lane % kDecodeWarps,
                      down ? blocks * share.active_experts : share.last_group - share.first_group,
                      down ? args.down : args.gate_up,
                      down ? blocks * (share.all_active - share.active_experts) : 0,
                      args.shared_down);
  (down ? to.down : to.gate_up)[lane % kDecodeWarps] = run;
}
// A row of down's subtiles: 16 output channels of an active expert. Routed experts are those of the
// cta's first block, then of the next one; then follow the blocks of the shared expert.
struct DecodeDownRow {
  int32_t block, active;  // block: from the cta's first one

  __device__ DecodeDownRow(const DecodeShare& share, int32_t row) : block(0), active(row) {
    const int32_t blocks = share.last_block - share.first_block;
    while (active >= share.active_experts && block < blocks)
      active -= share.active_experts, ++block;
    if (block == blocks) block = active, active = share.active_experts;
  }
};
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

// Goes through the subtiles of a warp: its run of gate/up, then its run of down.
struct DecodeSubtiles {
  static constexpr int64_t step = cuda::kTileBytes;  // from a subtile of a row to the next one
  // Where a lane's scales are among those of a subtile.
  __device__ static uint32_t scales_of(uint32_t lane) { return lane / 4 * 8; }

  const DecodeArgs& args;
  const DecodeShare& share;
  const Bf16DecodeRouting& routing;
  DecodeRows rows;  // from the next one on
  bool in_down = false;
  const uint8_t* at;            // codes of the next subtile
  int32_t left = 0, scales_at;  // subtiles of the row that are left

  __device__ DecodeSubtiles(const DecodeArgs& args_, const DecodeShare& share_,
                            const Bf16DecodeRouting& routing_)
      : args(args_), share(share_), routing(routing_), rows(routing.gate_up[threadIdx.x / 32]) {}
  // Begins the next row, once none of this one is left; false at the end. kDown: no row of gate/up
  // is left.
  template <bool kDown>
  __device__ bool next_row() {
    if (!rows.more()) {
      if (in_down) return false;
      in_down = true, rows = DecodeRows(routing.down[threadIdx.x / 32]);
      if (!rows.more()) return false;
    }
    if (!kDown && !in_down) {
      const DecodeGroup group(args, share, share.first_group + rows.row);
      const DecodePart& part = part_of(args, share, group.active);
      begin(part.weights + routing.expert_of[group.active] * part.expert_stride, group.group,
            args.k_tiles);
    } else {
      const DecodeDownRow of(share, rows.row);
      const DecodePart& part = part_of(args, share, of.active);
      begin(part.weights + routing.expert_of[of.active] * part.expert_stride + part.down_offset,
            share.first_block + of.block, part.down_k_tiles);
    }
    return true;
  }
  __device__ void begin(const uint8_t* matrix, int32_t group, int32_t k_tiles) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t end = rows.end(k_tiles);
    at = matrix + int64_t{(group >> 3) * k_tiles + rows.k_tile} * cuda::kTileBytes +
         (group & 7) * 1024 + lane * 16;
    scales_at = static_cast<int32_t>(cuda::kTileCodeBytes) - (group & 7) * (1024 - 128) - lane * 12;
    left = end - rows.k_tile;
    rows.advance(end);
  }
};

// Partial accumulators in shared memory. A run that begins within a row stores its partials of that
// row in its slot. The warp whose run has the row's first subtile adds them to its own in the order
// of the runs, which is the order of K, so that equal calls have equal bits.
struct DecodePartials {
  float4* slots;  // (16 warps, 32 lanes)

  __device__ void put(int32_t warp, const float (&values)[4]) const {
    slots[warp * 32 + threadIdx.x % 32] = make_float4(values[0], values[1], values[2], values[3]);
  }
  // Adds the partials of the row of the run's last subtile. missing: subtiles of that row after the
  // run. Called after a barrier of the cta.
  __device__ void add_rest(const DecodeRun& run, int32_t missing, float (&to)[4]) const {
    const int32_t end = run.last + missing;
    int32_t next = run.warp + 1;
#pragma unroll 1
    for (int32_t begin = run.last; begin < end; ++next) {
      const int32_t after = run.begin(next + 1);
      if (after == begin) continue;  // an empty run
      const float4 values = slots[next * 32 + threadIdx.x % 32];
      to[0] += values.x, to[1] += values.y, to[2] += values.z, to[3] += values.w;
      begin = after;
    }
  }
};

// A warp's ring of subtiles in shared memory. Each lane copies the codes that it reads itself;
// lanes share the scales. Subtiles: the warp's, in order (DecodeSubtiles or Fp8Subtiles).
template <class Subtiles>
struct DecodeRing {
  // Shared addresses in the first subtile. Pinned, since the compiler would compute them again for
  // each subtile.
  uint32_t lane_codes, lane_scales, lane_copy;
  uint32_t slot = 0;
  Subtiles subtiles;

  __device__ DecodeRing(const uint8_t* rings, const Subtiles& subtiles_) : subtiles(subtiles_) {
    const uint32_t lane = threadIdx.x % 32,
                   first = cuda::ptx::shared_address(rings) +
                           threadIdx.x / 32 * (kDecodeDepth * kDecodeSubtileBytes);
    lane_codes = first + lane * 16;
    lane_scales = first + 1024 + Subtiles::scales_of(lane);
    lane_copy = first + 1024 + lane * 4;
    cuda::ptx::pin(lane_codes), cuda::ptx::pin(lane_scales), cuda::ptx::pin(lane_copy);
  }
  // Starts the copy of the next subtile, if there is one, into the slot.
  template <bool kDown>
  __device__ void copy() {
    if (subtiles.left > 0 || subtiles.template next_row<kDown>()) {
      const uint8_t* const codes = subtiles.at;
      cuda::ptx::cp_async_16(lane_codes + slot, codes);
      cuda::ptx::cp_async_16(lane_codes + slot + 512, codes + 512);
      cuda::ptx::cp_async_4(lane_copy + slot, codes + subtiles.scales_at);
      subtiles.at += subtiles.step;
      --subtiles.left;
    }
    cuda::ptx::cp_async_commit_group();
    slot = slot == (kDecodeDepth - 1) * kDecodeSubtileBytes ? 0 : slot + kDecodeSubtileBytes;
  }
  __device__ void start() {
#pragma unroll 1
    for (uint32_t i = 0; i < kDecodeDepth; ++i) copy<false>();
  }
  // Waits for the oldest subtile.
  __device__ static void wait() {
    cuda::ptx::cp_async_wait_group<kDecodeDepth - 1>();
    __syncwarp();
  }
  // Reads 64 k of the oldest subtile.
  __device__ Bf16Products::Weights read(int half) const {
    const uint4 codes = load_shared_16(lane_codes + slot + half * 512);
    const uint2 scales = load_shared_8(lane_scales + slot + half * 64);
    return {{codes.x, codes.y, codes.z, codes.w}, {scales.x, scales.y}};
  }
  // Starts the copy of the next subtile into the slot of the oldest one, which has been read.
  template <bool kDown>
  __device__ void replace() {
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

// Activations of 64 k for one lane: two k16 steps in each vector.
struct DecodeColumns {
  uint4 words[2];
};

// Two chains of accumulators: rows r and r + 8 of the weights, tokens 2q and 2q + 1.
struct DecodeAccumulators {
  float chains[2][4] = {};

  __device__ void multiply(const Bf16Products::Weights& weights, const DecodeColumns& columns,
                           const Bf16Products::Constants& constants) {
#pragma unroll
    for (int step = 0; step < Bf16Products::kSteps; ++step) {
      uint32_t fragment[4];
      Bf16Products::dequantize(weights, step, constants, fragment);
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

// A row of hidden in shared memory, in the order of B fragments.
struct SharedColumns {
  uint32_t at;  // this lane's first 16 bytes

  __device__ DecodeColumns next() {
    DecodeColumns columns;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
      columns.words[i] = DecodeRing<DecodeSubtiles>::load_shared_16(at + i * 64);
    at += 128;
    return columns;
  }
};
// Where a lane reads a row of the intermediate in global memory.
struct ColumnsAt {
  const uint8_t* first;  // this lane's first 16 bytes
  int32_t vectors;       // of 32 k, that the row still has from there on
};
// A row of the intermediate in global memory; zeros after its end. Reads 64 k ahead, which
// dequantizing hides.
class GlobalColumns {
 public:
  __device__ explicit GlobalColumns(const ColumnsAt& from) : from_(from) { read(); }
  __device__ DecodeColumns next() {
    const DecodeColumns columns = ahead_;
    from_.first += 128, from_.vectors -= 2;
    read();
    return columns;
  }

 private:
  __device__ void read() {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ahead_.words[i] = i < from_.vectors
                            ? __ldcg(reinterpret_cast<const uint4*>(from_.first + i * 64))
                            : uint4{};
  }

  ColumnsAt from_;
  DecodeColumns ahead_;
};

// Multiplies `count` subtiles of a row, which are the ring's next ones. to: rows r and r + 8,
// tokens 2q and 2q + 1.
template <bool kDown, class Columns>
__device__ inline void multiply_subtiles(DecodeRing<DecodeSubtiles>& ring, Columns columns,
                                         int32_t count, const Bf16Products::Constants& constants,
                                         float (&to)[4]) {
  DecodeAccumulators accumulators;
#pragma unroll 1
  for (; count > 0; --count) {
    ring.wait();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const DecodeColumns now = columns.next();
      const Bf16Products::Weights weights = ring.read(half);
      if (half == 1) ring.template replace<kDown>();
      accumulators.multiply(weights, now, constants);
    }
  }
  accumulators.sum(to);
}

}  // namespace nvfp4_moe::internal::sm90
