// What the grouped GEMMs of every architecture share: a tile is 128 packed weight rows x kRows lines of activations
// over the whole of K. What multiplies it is a Tile (mma_tile.cuh): kRows, and
//   static __device__ void multiply(const GemmArgs&, const BlockRows&, int64_t row_tile, Sums<kRows>&)
// for all threads of the block. What is done with the sums is the step's.
//
// Weights are the A operand: each of eight warps owns 16 of the tile's rows, loads them 16 bytes a lane, coalesced and
// some steps ahead, and widens them to bf16 in registers (packed_tile.h): exactly e2m1 * e4m3, so that all rounding is
// that of the fp32 sums. Lines are the B operand, gathered row by row into shared memory, 64 k a stage; a stage's
// 16-byte pieces are placed at piece ^ (line % 8): no bank conflicts for ldmatrix, and what wgmma calls a 128-byte
// swizzle. A row's sums depend on no other row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/scratch.h"

namespace nvfp4_moe::cuda {

inline constexpr int kGemmThreads = 32 * kGroups;
inline constexpr int kStageK = 64;  // k of a stage: one lane's 16 bytes

// A grouped GEMM's sides.
struct GemmArgs {
  const uint8_t* weights;  // tiles of expert 0
  int64_t expert_stride;   // bytes
  int64_t k_tiles;
  int64_t k;                         // columns of x; the weights' padding beyond is 0
  const uint16_t* x;                 // (lines, K) bf16
  const int32_t* assignment_of_row;  // (R): line = choice / top_k; null: line = row
  int64_t top_k;
  const int64_t* row_offsets;  // (2) of dense rows
  const RowTile* tiles;        // null: one expert, dense rows
  const int32_t* tile_count;
};

// The rows that this block works on.
struct BlockRows {
  int64_t expert = 0, first = 0;
  int count = 0;  // 0: none
};
template <int kRows>
__device__ BlockRows rows_of_block(const GemmArgs& args) {
  BlockRows rows;
  if (args.tiles == nullptr) {
    rows.first = int64_t{blockIdx.x} * kRows;
    rows.count = static_cast<int>(min(int64_t{kRows}, args.row_offsets[1] - rows.first));
    return rows;
  }
  if (blockIdx.x >= *args.tile_count) return rows;
  const RowTile tile = args.tiles[blockIdx.x];
  return {tile.expert, tile.first_row, tile.rows};
}
__device__ inline int64_t line_of_row(const GemmArgs& args, int64_t row) {
  return args.assignment_of_row == nullptr ? row : args.assignment_of_row[row] / args.top_k;
}

// Eight codes of one k16 step as the A fragment, with the scales of an even or odd step.
__device__ inline void widen(uint32_t codes, uint32_t scale_word, bool odd, uint32_t (&a)[4]) {
  constexpr uint32_t kTwoTo126 = 0x7E807E80u;  // lifts e2m1 2^-126 to e2m1
  const uint32_t scales = (scales_in_place(scale_word, odd) & kScalesMask) + 0x3A803A80u;
  const uint32_t scale_of_row[2] = {__byte_perm(scales, 0, 0x1010), __byte_perm(scales, 0, 0x3232)};
  const CodePairs pairs = code_pairs(codes);
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = multiply_bf16x2(multiply_bf16x2(pairs.a[i], kTwoTo126), scale_of_row[i % 2]);
}

// One step of a lane's weights: codes of four k16 steps and the scales of its two rows.
struct StepWeights {
  uint4 codes;
  uint2 scales;
};
// tiles: of the block's expert and row tile. Zeros at and beyond `steps`.
__device__ inline StepWeights load_weights(const uint8_t* tiles, int64_t step, int64_t steps) {
  if (step >= steps) return {};
  const int lane = static_cast<int>(threadIdx.x % 32), group = static_cast<int>(threadIdx.x / 32);
  const uint8_t* const tile = tiles + step / kHalves * kTileBytes;
  const int half = static_cast<int>(step % kHalves);
  return {*reinterpret_cast<const uint4*>(tile + lane_offset(group, half, lane)),
          *reinterpret_cast<const uint2*>(tile + scale_offset(group, half, lane / 4))};
}
__device__ inline const uint8_t* row_tile_weights(const GemmArgs& args, const BlockRows& rows, int64_t row_tile) {
  return args.weights + rows.expert * args.expert_stride + row_tile * args.k_tiles * kTileBytes;
}

// Begins to copy a step of the block's lines to a stage of shared memory (kRows x 64 bf16); lines (kRows): where each
// row is read. Lines beyond the block's rows, and k beyond K, are zeros.
template <int kRows>
__device__ void copy_lines(const GemmArgs& args, int count, const int64_t* lines, int64_t step, uint32_t stage) {
  constexpr int kPieces = kStageK * 2 / 16;  // of 16 bytes
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kPieces; i += kGemmThreads) {
    const int line = i / kPieces, piece = i % kPieces;
    const int64_t k = step * kStageK + piece * 8;
    const bool valid = line < count && k < args.k;
    copy_async(stage + static_cast<uint32_t>(line * kStageK * 2 + (piece ^ line % 8) * 16),
               args.x + lines[line] * args.k + (valid ? k : 0), valid);
  }
  commit_copies();
}

template <int kRows>
struct Sums {
  float at[kRows / 8][4];  // (8 lines, d of mma_bf16)
};

// The first k of the fragment's rows in the tile: row r of group g, and the channel pair of a lane.
struct Fragment {
  int group = static_cast<int>(threadIdx.x / 32);
  int row = static_cast<int>(threadIdx.x % 32 / 4);  // r; the other is r + 8
  int line = static_cast<int>(threadIdx.x % 4 * 2);  // of eight; the other is the next
};

// The grid: row tiles along y, tiles of lines along x, so that blocks that run together share weights.
inline dim3 gemm_grid(int64_t line_tiles, int64_t row_tiles) {
  return dim3(static_cast<unsigned>(line_tiles), static_cast<unsigned>(row_tiles));
}

}  // namespace nvfp4_moe::cuda
