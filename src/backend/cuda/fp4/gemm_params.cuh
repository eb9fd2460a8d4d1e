// The parameters of GEMMs on FP4 tensor cores: a grouped GEMM's sizes, and the source of its rows
// of activations.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/row_tiles.cuh"
#include "backend/cuda/gemm/scheduler.h"

namespace nvfp4_moe::internal::cuda::fp4 {

struct GemmArgs {
  const uint8_t* weights;   // packed tiles of expert 0, (m_tiles, k_tiles) x kTileBytes
  int64_t expert_stride;    // bytes
  int32_t k_tiles;          // tiles of 128 k
  const std::byte* x;       // (tokens or rows, K) in the layout of fp4_operand.h
  int64_t x_stride;         // bytes
  ScheduleParams schedule;  // in k-blocks of kFp4KBlock
  Divider by_top_k;
  const int32_t* assignment_of_row;  // (R): row of x = assignment / top_k; null: the row itself
  RowTileList row_tiles;
  float* partials;    // (2 ctas, 128, tile_n) for split tiles, in the accumulators' order
  int32_t* arrivals;  // (ctas) arrived splits per tile; 0 before and after
  // route has ended when this kernel starts; otherwise only after grid_dependency_wait
  bool after_route;
};

// The factors of a row's accumulators: alpha = fl32(row scale * tensor scale) for each tensor
// scale, and the router's weight or 1.
struct alignas(16) RowFactor {
  float first, second, weight;
};

}  // namespace nvfp4_moe::internal::cuda::fp4
