// gemm2: part.intermediate (R, I), down tiles -> part.rows_out (R, H) in row_format; the kernel of every architecture.
//
// row = alpha_down * dot in fp32, alpha = fl32(line scale * tensor scale), then row_format. A flagged row is NaN: its
// alpha is. Under bf16 the intermediate itself is the operand, NaN and Inf included.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "backend/sm80/gemm_launch.h"
#include "backend/sm80/gemm_tile.cuh"

namespace nvfp4_moe::cuda {

struct Gemm2Args {
  GemmArgs gemm;
  const TensorScales* tensor_scales;  // (E)
  const float* row_scale;             // (R), or null: 1
  void* out;                          // (R, H) kRow
  int64_t hidden;
};

// Tile: what multiplies a tile of rows (gemm_tile.cuh).
template <class Tile, DType kRow>
__global__ void __launch_bounds__(kGemmThreads, 1) gemm2_kernel(Gemm2Args args) {
  constexpr int kRows = Tile::kRows;
  __shared__ float alphas[kRows];
  wait_for_previous();
  let_next_start();  // not before: what comes after this kernel may rely on route
  const BlockRows rows = rows_of_block<kRows>(args.gemm);
  if (rows.count <= 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < rows.count; i += kGemmThreads) {
    const double row_scale = args.row_scale != nullptr ? double{args.row_scale[rows.first + i]} : 1.0;
    alphas[i] = static_cast<float>(row_scale * double{args.tensor_scales[rows.expert].down});
  }  // multiply's barriers come before they are read

  Sums<kRows> sums;
  Tile::multiply(args.gemm, rows, blockIdx.y, sums);

  const Fragment fragment;
  const int64_t channel = int64_t{blockIdx.y} * kTileRows + fragment.group * kGroupRows + fragment.row;
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = n * 8 + fragment.line + i % 2;
      const int64_t at = channel + i / 2 * 8;
      if (row < rows.count && at < args.hidden)
        store_element<kRow>(args.out, (rows.first + row) * args.hidden + at, sums.at[n][i] * alphas[row]);
    }
}

inline Gemm2Args gemm2_args(const StepContext& step, const PartBuffers& part, const PartTiles& tiles) {
  const MoeConfig& config = step.weights.config;
  const Scratch scratch(step);
  const bool nvfp4 = config->activation_format == ActivationFormat::kNvfp4;
  Gemm2Args args{};
  args.gemm.weights = reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) + tiles.layout.offset +
                      (part.down_only ? 0 : tiles.layout.gate_up.bytes());
  args.gemm.expert_stride = tiles.layout.expert_stride;
  args.gemm.k_tiles = tiles.layout.down.k_tiles;
  args.gemm.k = part.intermediate_size;
  args.gemm.x = !nvfp4 ? part.intermediate.bf16 : tiles.shared ? scratch.shared_operand : scratch.routed_operand;
  args.gemm.row_offsets = part.row_offsets;
  args.gemm.tiles = tiles.shared ? nullptr : scratch.tiles;
  args.gemm.tile_count = scratch.tile_count;
  args.tensor_scales = tensor_scales(step.weights, tiles.shared);
  args.row_scale = part.intermediate.row_scale;  // null under bf16, but for a linear
  args.out = part.rows_out;
  args.hidden = config->hidden_size;
  return args;
}

// SmallTile, LargeTile: Tiles of kSmallTileRows and kLargeTileRows.
template <class SmallTile, class LargeTile>
void launch_gemm2(const StepContext& step, const PartBuffers& part) {
  if (step.batch.tokens == 0) return;
  const PackedLayout packed(step.weights.config, step.weights.range);
  const PartTiles tiles(step, part, packed);
  const Gemm2Args args = gemm2_args(step, part, tiles);
  const dim3 grid = gemm_grid(tiles.tile_bound, tiles.layout.down.row_tiles);
  const bool small = tiles.rows_of_tile == kSmallTileRows;
  if (step.weights.config->row_format == RowFormat::kBf16) {
    if (small)
      launch<gemm2_kernel<SmallTile, DType::kBf16>>(grid, kGemmThreads, 0, step.stream, args);
    else
      launch<gemm2_kernel<LargeTile, DType::kBf16>>(grid, kGemmThreads, 0, step.stream, args);
  } else {
    if (small)
      launch<gemm2_kernel<SmallTile, DType::kF32>>(grid, kGemmThreads, 0, step.stream, args);
    else
      launch<gemm2_kernel<LargeTile, DType::kF32>>(grid, kGemmThreads, 0, step.stream, args);
  }
}

}  // namespace nvfp4_moe::cuda
