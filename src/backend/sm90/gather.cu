// One block a token: its line is read once and written to each of its rows.
#include <cuda_runtime.h>

#include "backend/cuda/launch.cuh"
#include "backend/sm90/gather.h"

namespace nvfp4_moe::sm90 {
namespace {

constexpr int kThreads = 128;
constexpr int kMostRows = 8;  // of a token at a time

__global__ void __launch_bounds__(kThreads)
    sm90_gather_rows(const uint4* x, uint4* rows, const int32_t* row_of_choice, int32_t top_k, int32_t pieces) {
  cuda::let_next_start();
  cuda::wait_for_previous();
  const int64_t token = blockIdx.x;
  for (int32_t first = 0; first < top_k; first += kMostRows) {
    int32_t row[kMostRows];
    bool any = false;
#pragma unroll
    for (int k = 0; k < kMostRows; ++k) {
      row[k] = first + k < top_k ? row_of_choice[token * top_k + first + k] : -1;
      any |= row[k] >= 0;
    }
    if (!any) continue;
#pragma unroll 4
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < pieces; i += kThreads) {
      const uint4 piece = x[token * pieces + i];
#pragma unroll
      for (int k = 0; k < kMostRows; ++k)
        if (row[k] >= 0) rows[int64_t{row[k]} * pieces + i] = piece;
    }
  }
}

}  // namespace

const uint16_t* gather_rows(const HostCall& call, const HostPart& part, const uint16_t* x) {
  const MoeConfig& config = call.weights.config;
  cuda::launch<sm90_gather_rows>(static_cast<unsigned>(call.batch.tokens), kThreads, 0, call.stream,
                                 reinterpret_cast<const uint4*>(x), static_cast<uint4*>(part.rows_out),
                                 call.buffers.row_of_choice, static_cast<int32_t>(config->top_k),
                                 static_cast<int32_t>(config->hidden_size / 8));
  return static_cast<const uint16_t*>(part.rows_out);
}

}  // namespace nvfp4_moe::sm90
