// The grouped GEMM on plain tensor cores, mma.sync m16n8k16, for every GPU from sm_80 on: a tile is
// 128 packed weight rows times tile_n rows of activations over all of K.
//
// Weights are the A operand. Each of eight warps owns 16 of the tile's weight rows, loads them 16
// bytes per lane, coalesced and some stages ahead, and dequantizes them to bf16 in registers
// (packed_tile.h): exactly e2m1 * e4m3, or under fp8 the E4M3 value that the contract defines,
// which bf16 holds exactly. So only the fp32 accumulators round. Activations are the B operand,
// gathered row by row into shared memory, 64 k per stage; 16-byte vectors of a row are stored at
// vector ^ (row % 8), so that ldmatrix has no bank conflicts. A row's accumulators depend on no
// other row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/packed_layout.h"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/plain/config.h"
#include "backend/cuda/ptx/cp_async.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal::cuda::plain {

inline constexpr int kGemmThreads = 32 * kGroups;
inline constexpr int kStageK = 64;  // k per stage: one lane's 16 bytes
inline constexpr int kStages = 4;

// A grouped GEMM's operands.
struct GemmArgs {
  const uint8_t* weights;  // tiles of expert 0
  int64_t expert_stride;   // bytes
  int64_t k_tiles;
  int64_t k;                         // columns of x; the weights' padding beyond it is 0
  const uint16_t* x;                 // (tokens or rows, K) bf16
  const int32_t* assignment_of_row;  // (R): row of x = assignment / top_k; null: the row itself
  int64_t top_k;
  const int64_t* row_offsets;  // (2) for dense rows
  const RowTile* tiles;        // null: one expert with dense rows
  const int32_t* tile_count;
};

// The rows that this CTA processes.
struct CtaRows {
  int64_t expert = 0, first = 0;
  int count = 0;  // 0: no rows
};
template <int kTileN>
__device__ CtaRows rows_of_cta(const GemmArgs& args) {
  CtaRows rows;
  if (args.tiles == nullptr) {
    rows.first = int64_t{blockIdx.x} * kTileN;
    rows.count = static_cast<int>(min(int64_t{kTileN}, args.row_offsets[1] - rows.first));
    return rows;
  }
  if (blockIdx.x >= *args.tile_count) return rows;
  const RowTile tile = args.tiles[blockIdx.x];
  return {tile.expert, tile.first_row, tile.rows};
}
__device__ inline int64_t source_row(const GemmArgs& args, int64_t row) {
  return args.assignment_of_row == nullptr ? row : args.assignment_of_row[row] / args.top_k;
}

// Converts the scales of weight rows r and r + 8 of a fragment to bf16. kE4m3: weights are rounded
// to E4M3, and the scales are divided by the 2^shift of each row's matrix.
template <bool kE4m3>
struct WeightScales {
  static constexpr uint32_t offset = 0x3A803A80u;
  __device__ WeightScales(int32_t, int32_t) {}
};
template <>
struct WeightScales<true> {
  uint32_t offset;
  __device__ WeightScales(int32_t shift, int32_t shift_of_other)
      : offset(bits(shift) | bits(shift_of_other) << 16) {}

 private:
  __device__ static uint32_t bits(int32_t shift) {
    return static_cast<uint32_t>(0x3A80 - shift * 128);
  }
};

// Rounds pairs of bf16, with at most 6 significant bits and at most 448, to E4M3, ties to even:
// adds and subtracts a number whose ulp is E4M3's, which is an eighth of the value's power of two,
// or of 2^-6 for smaller values.
__device__ inline uint32_t round_to_e4m3(uint32_t pair) {
  const uint32_t exponents = __vmaxu2(pair & 0x7F807F80u, 0x3C803C80u);
  const uint32_t by = exponents + 0x02400240u;  // 1.5 * 2^4 times the power of two
  return add_bf16x2(add_bf16x2(pair, by), by ^ 0x80008000u);
}

// Converts eight codes of one k16 step to the A fragment, with the scales of an even or odd step.
template <bool kE4m3>
__device__ void dequantize(uint32_t codes, uint32_t scale_word, bool odd,
                           const WeightScales<kE4m3>& weight_scales, uint32_t (&a)[4]) {
  constexpr uint32_t kTwoTo126 = 0x7E807E80u;  // scales e2m1 2^-126 to e2m1
  const uint32_t scales = (scales_of_step(scale_word, odd) & kScalesMask) + weight_scales.offset;
  const uint32_t scale_of_row[2] = {__byte_perm(scales, 0, 0x1010), __byte_perm(scales, 0, 0x3232)};
  const CodePairs pairs = code_pairs(codes);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = multiply_bf16x2(multiply_bf16x2(pairs.a[i], kTwoTo126), scale_of_row[i % 2]);
    if constexpr (kE4m3) a[i] = round_to_e4m3(a[i]);
  }
}

// A stage of a lane's weights: codes of four k16 steps and the scales of its two weight rows.
struct StageWeights {
  uint4 codes;
  uint2 scales;
};
// tiles: of the CTA's expert and tile of weight rows. Zeros from `stages` on.
__device__ inline StageWeights load_weights(const uint8_t* tiles, int64_t stage, int64_t stages) {
  if (stage >= stages) return {};
  const int lane = static_cast<int>(threadIdx.x % 32), group = static_cast<int>(threadIdx.x / 32);
  const uint8_t* const tile = tiles + stage / kHalves * kTileBytes;
  const int half = static_cast<int>(stage % kHalves);
  return {*reinterpret_cast<const uint4*>(tile + lane_offset(group, half, lane)),
          *reinterpret_cast<const uint2*>(tile + scale_offset(group, half, lane / 4))};
}

// Starts to copy a stage of the CTA's rows to shared memory (kTileN x 64 bf16). sources (kTileN):
// the row of x for each row. Rows beyond the CTA's, and k beyond K, become zeros.
template <int kTileN>
__device__ void copy_rows(const GemmArgs& args, int count, const int64_t* sources, int64_t stage,
                          uint32_t to) {
  constexpr int kVectors = kStageK * 2 / 16;  // of 16 bytes
  for (int i = static_cast<int>(threadIdx.x); i < kTileN * kVectors; i += kGemmThreads) {
    const int row = i / kVectors, vector = i % kVectors;
    const int64_t k = stage * kStageK + vector * 8;
    const bool valid = row < count && k < args.k;
    ptx::cp_async_16_or_zeros(
        to + static_cast<uint32_t>(row * kStageK * 2 + (vector ^ row % 8) * 16),
        args.x + sources[row] * args.k + (valid ? k : 0), valid);
  }
  ptx::cp_async_commit_group();
}

template <int kTileN>
struct Accumulators {
  float at[kTileN / 8][4];  // (8 rows, d of mma_bf16)
};

// The position of a lane's accumulators: weight rows `row` and row + 8 of group `group`, rows of
// activations `n` and n + 1 of each eight.
struct Fragment {
  int group = static_cast<int>(threadIdx.x / 32);
  int row = static_cast<int>(threadIdx.x % 32 / 4);
  int n = static_cast<int>(threadIdx.x % 4 * 2);
};

// accumulators = weight rows of the tile times the CTA's rows. Called by all threads.
template <int kTileN, bool kE4m3>
__device__ void multiply(const GemmArgs& args, const CtaRows& rows, int64_t weight_tile,
                         const WeightScales<kE4m3>& weight_scales,
                         Accumulators<kTileN>& accumulators) {
  __shared__ alignas(128) uint16_t buffers[kStages][kTileN * kStageK];
  __shared__ int64_t sources[kTileN];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  for (int i = thread; i < kTileN; i += kGemmThreads)
    sources[i] = source_row(args, rows.first + min(i, rows.count - 1));
  __syncthreads();

  const int64_t stages = (args.k + kStageK - 1) / kStageK;
  const uint8_t* const tiles =
      args.weights + rows.expert * args.expert_stride + weight_tile * args.k_tiles * kTileBytes;
  const auto address = [&](int buffer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(buffers[buffer]));
  };
  StageWeights weights[kStages];
#pragma unroll
  for (int buffer = 0; buffer < kStages; ++buffer)
    weights[buffer] = load_weights(tiles, buffer, stages);
#pragma unroll
  for (int buffer = 0; buffer < kStages - 1; ++buffer)
    copy_rows<kTileN>(args, rows.count, sources, buffer, address(buffer));
#pragma unroll
  for (auto& of_rows : accumulators.at)
    for (float& value : of_rows) value = 0;

  for (int64_t first = 0; first < stages; first += kStages) {
#pragma unroll
    for (int buffer = 0; buffer < kStages; ++buffer) {
      const int64_t stage = first + buffer;
      if (stage >= stages) break;
      ptx::cp_async_wait_group<kStages - 2>();
      // the stage is visible to all threads, and all have finished with the buffer that is filled
      // next
      __syncthreads();
      copy_rows<kTileN>(args, rows.count, sources, stage + kStages - 1,
                        address((buffer + kStages - 1) % kStages));
      const StageWeights now = weights[buffer];
      weights[buffer] = load_weights(tiles, stage + kStages, stages);
      const uint32_t words[4] = {now.codes.x, now.codes.y, now.codes.z, now.codes.w};
      const uint32_t scale_words[2] = {now.scales.x, now.scales.y};
#pragma unroll
      for (int pair = 0; pair < 2;
           ++pair) {  // two k16 steps: one word of scales, one load of four matrices
        uint32_t a[2][4];
        dequantize(words[2 * pair], scale_words[pair], false, weight_scales, a[0]);
        dequantize(words[2 * pair + 1], scale_words[pair], true, weight_scales, a[1]);
#pragma unroll
        for (int n = 0; n < kTileN / 8; ++n) {
          const int row = n * 8 + lane % 8, vector = pair * 4 + lane / 8;
          uint32_t b[4];
          load_matrices(b, address(buffer) +
                               static_cast<uint32_t>(row * kStageK * 2 + (vector ^ row % 8) * 16));
          mma_bf16(accumulators.at[n], a[0], b[0], b[1]);
          mma_bf16(accumulators.at[n], a[1], b[2], b[3]);
        }
      }
    }
  }
  ptx::cp_async_wait_group<0>();
}

// Shared by both GEMMs of a part: the part's tiles of rows, and the grid. Tiles of weight rows are
// along y, tiles of rows along x, so that CTAs that run together share weights.
struct PartTiles {
  bool shared;
  PartLayout layout;
  int64_t tiles;  // upper bound of tiles of rows

  PartTiles(const StepContext& step, const PartBuffers& part, int tile_n)
      : shared(&part == &step.buffers.shared) {
    const PackedLayout packed(step.weights.config, step.weights.range);
    layout = shared ? packed.shared : packed.routed;
    tiles = shared
                ? ceil_div(step.batch.tokens, tile_n)
                : tile_bound(step.batch.tokens * step.weights.config->top_k, part.experts, tile_n);
  }
  dim3 grid(int64_t weight_tiles) const {
    return dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(weight_tiles));
  }
};

// Calls body with the tile's rows, and whether weights are rounded to E4M3, as template arguments.
template <class Body>
Status with_config(const StepContext& step, int tile_n, const Body& body) {
  const bool small = tile_n == kSmallTileN;
  if (step.plan->e4m3_weights)
    return small ? body.template operator()<kSmallTileN, true>()
                 : body.template operator()<kLargeTileN, true>();
  return small ? body.template operator()<kSmallTileN, false>()
               : body.template operator()<kLargeTileN, false>();
}

// All arguments except weights, x, k and assignment_of_row.
inline GemmArgs gemm_args(const PartBuffers& part, const PartTiles& tiles, const Scratch& scratch) {
  GemmArgs args{};
  args.expert_stride = tiles.layout.expert_stride;
  args.row_offsets = part.row_offsets;
  args.tiles = tiles.shared ? nullptr : scratch.tiles;
  args.tile_count = scratch.tile_count;
  return args;
}

}  // namespace nvfp4_moe::internal::cuda::plain
