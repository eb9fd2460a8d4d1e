// The steps of the layer on a GPU, in the order they run. Each enqueues its kernels in call.stream and returns; a
// launch that fails leaves its error for cudaGetLastError, which run reads once at its end.
#pragma once

#include "backend/layer_steps.h"

namespace nvfp4_moe::cuda {

// What a backend's GEMMs want of route.
struct Tiling {
  int rows;          // of a tile, at most
  bool even;         // an expert's tiles share its rows (even_tile_rows)
  int32_t* cleared;  // (cleared_count) counters to be 0 after route; null: none
  int32_t cleared_count;
  bool flags_rows;  // gemm1 says of each routed row whether it has NaN or Inf, in intermediate.nonfinite
};
Tiling tiling(const StepContext& step);  // of this backend

void route(const StepContext& step);
void route_in_tiles(const StepContext& step, const Tiling& tiling);
void quantize(const StepContext& step);
void gemm1_swiglu(const StepContext& step, const PartBuffers& part);
void requantize(const StepContext& step, const PartBuffers& part);
void gemm2(const StepContext& step, const PartBuffers& part);
void combine(const StepContext& step);

// What the walk does in place of steps, with the same results: fewer kernels, one after the other, count.
//
// route and quantize as one kernel, for batches that one block routes; quantize's counts are left for
// combine_and_count.
bool routes_and_quantizes_at_once(const StepContext& step);
void route_and_quantize(const StepContext& step, const Tiling& tiling);
// combine, and beside it what is not counted yet: those counts, and requantize's of the bf16 format, which has nothing
// else to do there.
void combine_and_count(const StepContext& step, const Tiling& tiling);

}  // namespace nvfp4_moe::cuda
