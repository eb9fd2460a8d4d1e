// gemm1_swiglu: hidden (T, H), joined gate/up tiles -> part.intermediate.bf16 (R, I); the kernel of every architecture.
//
// g = alpha_gate * dot, u = alpha_up * dot in fp32, alpha = fl32(line scale * tensor scale); the activation function,
// the router weight under before_down, one rounding to bf16. Gate and up of one channel are rows r and r + 8 of a
// fragment, so that both sums are in one lane. Rows of a flagged token are NaN: their alpha is.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/steps/activation.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "backend/sm80/gemm_launch.h"
#include "backend/sm80/gemm_tile.cuh"

namespace nvfp4_moe::cuda {

struct Gemm1Args {
  GemmArgs gemm;
  const TensorScales* tensor_scales;  // (E)
  const float* row_scale;             // (T), or null: 1
  const uint8_t* nonfinite;           // (T)
  const float* router_weights;        // (T k) by choice, or null: 1
  GatedActivation activation;
  uint16_t* out;  // (R, I) bf16
  int64_t intermediate;
};

struct LineFactors {
  float gate, up, weight;
};

// Tile: what multiplies a tile of rows (gemm_tile.cuh).
template <class Tile>
__global__ void __launch_bounds__(kGemmThreads, 1) gemm1_swiglu_kernel(Gemm1Args args) {
  constexpr int kRows = Tile::kRows;
  __shared__ LineFactors factors[kRows];
  wait_for_previous();
  let_next_start();  // not before: what comes after this kernel may rely on route
  const BlockRows rows = rows_of_block<kRows>(args.gemm);
  if (rows.count <= 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < rows.count; i += kGemmThreads) {
    const int64_t line = line_of_row(args.gemm, rows.first + i);
    const TensorScales& tensor = args.tensor_scales[rows.expert];
    const double row_scale = args.nonfinite[line] != 0   ? double{__uint_as_float(0x7FC00000u)}
                             : args.row_scale != nullptr ? double{args.row_scale[line]}
                                                         : 1.0;
    factors[i] = {
        static_cast<float>(row_scale * double{tensor.gate}), static_cast<float>(row_scale * double{tensor.up}),
        args.router_weights != nullptr ? args.router_weights[args.gemm.assignment_of_row[rows.first + i]] : 1.0f};
  }  // multiply's barriers come before they are read

  Sums<kRows> sums;
  Tile::multiply(args.gemm, rows, blockIdx.y, sums);

  const Fragment fragment;
  const int64_t channel = int64_t{blockIdx.y} * (kTileRows / 2) + fragment.group * 8 + fragment.row;
  if (channel >= args.intermediate) return;
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = n * 8 + fragment.line + i;
      if (row >= rows.count) continue;
      const LineFactors& factor = factors[row];
      const float g = sums.at[n][i] * factor.gate, u = sums.at[n][2 + i] * factor.up;
      args.out[(rows.first + row) * args.intermediate + channel] =
          bf16_from_float(args.activation(g, u) * factor.weight);
    }
}

inline Gemm1Args gemm1_args(const StepContext& step, const PartBuffers& part, const PartTiles& tiles) {
  const MoeConfig& config = step.weights.config;
  const Scratch scratch(step);
  const bool nvfp4 = config->activation_format == ActivationFormat::kNvfp4;
  Gemm1Args args{};
  args.gemm.weights = reinterpret_cast<const uint8_t*>(step.weights.bytes.data()) + tiles.layout.offset;
  args.gemm.expert_stride = tiles.layout.expert_stride;
  args.gemm.k_tiles = tiles.layout.gate_up.k_tiles;
  args.gemm.k = config->hidden_size;
  args.gemm.x = nvfp4 ? scratch.hidden_operand : step.buffers.hidden.bf16;
  args.gemm.assignment_of_row = part.assignment_of_row;
  args.gemm.top_k = config->top_k;
  args.gemm.row_offsets = part.row_offsets;
  args.gemm.tiles = tiles.shared ? nullptr : scratch.tiles;
  args.gemm.tile_count = scratch.tile_count;
  args.tensor_scales = tensor_scales(step.weights, tiles.shared);
  args.row_scale = nvfp4 ? step.buffers.hidden.row_scale : nullptr;
  args.nonfinite = step.buffers.hidden.nonfinite;
  args.router_weights =
      config->router_weight == RouterWeight::kBeforeDown && !tiles.shared ? step.batch.topk_weights : nullptr;
  args.activation = {config->activation, config->swiglu_limit.value_or(0.0f), config->swiglu_alpha};
  args.out = part.intermediate.bf16;
  args.intermediate = part.intermediate_size;
  return args;
}

// SmallTile, LargeTile: Tiles of kSmallTileRows and kLargeTileRows.
template <class SmallTile, class LargeTile>
void launch_gemm1_swiglu(const StepContext& step, const PartBuffers& part) {
  if (step.batch.tokens == 0) return;
  const PackedLayout packed(step.weights.config, step.weights.range);
  const PartTiles tiles(step, part, packed);
  const Gemm1Args args = gemm1_args(step, part, tiles);
  const dim3 grid = gemm_grid(tiles.tile_bound, tiles.layout.gate_up.row_tiles);
  if (tiles.rows_of_tile == kSmallTileRows)
    launch<gemm1_swiglu_kernel<SmallTile>>(grid, kGemmThreads, 0, step.stream, args);
  else
    launch<gemm1_swiglu_kernel<LargeTile>>(grid, kGemmThreads, 0, step.stream, args);
}

}  // namespace nvfp4_moe::cuda
