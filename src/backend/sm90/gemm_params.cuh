// The parameters of the GEMM kernels: a grouped GEMM's sizes, the source of its rows of
// activations, and the epilogues' inputs.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "backend/cuda/gemm/biases.cuh"
#include "backend/cuda/gemm/gated_activation.cuh"
#include "backend/cuda/gemm/scheduler.h"
#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/quantize_args.cuh"
#include "backend/cuda/steps/small_batch.cuh"

namespace nvfp4_moe::internal::sm90 {

using cuda::Divider;
using cuda::GatedActivation;
using cuda::LaneBiases;
using cuda::Schedule;
using cuda::ScheduleParams;
using cuda::TileSplits;
using cuda::WorkTile;
using cuda::WorkTileIterator;

struct GemmArgs {
  const uint8_t* weights;      // packed tiles of expert 0, (m_blocks, k_blocks) x kTileBytes
  int64_t expert_stride;       // bytes
  int32_t m_blocks, k_blocks;  // packed tiles of 128 weight rows, and of 128 k
  ScheduleParams schedule;
  Divider by_top_k;
  const int32_t* assignment_of_row;  // (R): token = assignment / top_k; null: token = row
  const int64_t* row_offsets;        // (2) for dense rows
  const cuda::RowTile* row_tiles;  // (row_tile_count) from route; null: one expert with dense rows
  const int32_t* row_tile_count;   // (1)
  // (1) from route: whether row_tiles are those of the wide configuration; only if the kernel
  // contains one
  const int32_t* lists_wide;
  float* partials;    // (2 ctas, tile_m, tile_n) for split tiles, in the accumulators' order
  int32_t* arrivals;  // (ctas) arrived splits per tile; 0 before and after
  bool waits_for_requantize;  // so there is time to request more weights before its rows are ready
  // route has ended when this kernel starts; otherwise only after grid_dependency_wait
  bool after_route;
};

// Rows of activations that are gathered by cp.async: x (T, row_bytes), bf16 or E4M3. row_bytes is a
// multiple of 32; the weights' padding beyond it is 0.
struct GatheredRows {
  const std::byte* x;
  int32_t row_bytes;
  static constexpr bool kFusedRouting = false, kRequantizes = false;
};
// The same for a batch that is small enough for each cta to route itself while route runs. The cta
// then knows its weights, and may request them, before route has ended.
struct FusedRoutingRows {
  const std::byte* x;
  int32_t row_bytes;
  // x is the batch's own hidden, ready before this kernel starts, not only once route has ended
  bool x_is_input;
  cuda::AssignmentIds ids;
  static constexpr bool kFusedRouting = true, kRequantizes = false;
};
// Rows of the intermediate in expert order as gemm1 writes them. The row producers convert them to
// E4M3.
struct RequantizedRows {
  const uint16_t* x;  // (R, k) bf16
  int32_t k;
  cuda::RowScaleRule rule;
  cuda::Counters counters;
  static constexpr bool kFusedRouting = false, kRequantizes = true;
};
// Rows in expert order, (R, row_bytes), copied by TMA in tiles of kTmaTileRows x
// kTmaTileBytesOfRow.
struct TmaRows {
  CUtensorMap map;
  static constexpr bool kFusedRouting = false, kRequantizes = false;
};
inline constexpr int kTmaTileRows = 32, kTmaTileBytesOfRow = 128,
                     kTmaTileBytes = kTmaTileRows * kTmaTileBytesOfRow;

// Arguments of gemm1's epilogue.
struct Gemm1Params {
  const TensorScales* tensor_scales;  // (E)
  const float* row_scale;             // (T), or null: 1
  const uint8_t* nonfinite;           // (T)
  const float* router_weights;        // (T k) by assignment, or null: 1
  cuda::BiasTable bias_table;
  union {
    GatedActivation activation;
    cuda::GeluOrSitu gelu_or_situ;  // of GeluOrSituEpilogue
  };
  cuda::Gemm1Function function;  // selects the epilogue
  uint16_t* out;                 // (R, I) bf16
  int64_t channels;              // I
  uint8_t* nonfinite_rows;       // (R) set to 1 if a row has NaN or Inf; or null
};
// Arguments of gemm2's epilogue.
struct Gemm2Params {
  const TensorScales* tensor_scales;  // (E)
  const float* row_scale;             // (R), or null: 1
  cuda::BiasTable bias_table;
  void* out;  // (R, H) bf16, or fp32
  bool out_fp32;
  int64_t channels;  // H
};

// The tensor scales of one expert for either GEMM: gate's and up's, or down's.
struct ExpertScales {
  float first, second;
};
// The factors that a row applies to its accumulators.
struct RowScale {
  float scale;   // the row's own, NaN if its token is nonfinite
  float weight;  // the router's, or 1
};
// The factors of the accumulators of one row and one expert: alpha = fl32(row scale * tensor scale)
// for each tensor scale. They exclude the products' kAccumulatorFactor, with which a large alpha
// might overflow.
struct alignas(16) RowFactor {
  float first, second, weight;

  RowFactor() = default;
  __device__ RowFactor(const RowScale& row, const ExpertScales& scales)
      : first(row.scale * scales.first), second(row.scale * scales.second), weight(row.weight) {}
};

}  // namespace nvfp4_moe::internal::sm90
