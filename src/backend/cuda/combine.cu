// combine: rows_out (R, H), topk_weights (T, k) -> out (T, H).
//
// acc = fma(weight, row, acc) in fp32, from 0, in increasing k over the choices that have a row; acc + row under
// before_down. Then the shared expert's row, then one rounding to out's type. A token without any row gives zeros. The
// order is fixed, so the bits are those of every other backend.
#include <cuda_runtime.h>

#include <algorithm>

#include "backend/cuda/formats.cuh"
#include "backend/cuda/steps.h"

namespace nvfp4_moe::cuda {
namespace {

constexpr int kThreads = 256;

struct CombineArgs {
  const void* rows;              // (R, H) row_format
  const void* shared_rows;       // (T, H), or null
  const int32_t* row_of_choice;  // (T, top_k)
  const float* weights;          // (T, top_k), or null: rows are added as they are
  const float* shared_weights;   // (T), or null
  void* out;                     // (T, H)
  int64_t top_k, hidden;
};

// A block a token and 256 channels.
template <DType kRow, DType kOut>
__global__ void combine_tokens(CombineArgs args) {
  const int64_t token = blockIdx.x, channel = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (channel >= args.hidden) return;
  float acc = 0;
  for (int64_t k = 0; k < args.top_k; ++k) {
    const int64_t choice = token * args.top_k + k, row = args.row_of_choice[choice];
    if (row < 0) continue;
    const float value = load_element<kRow>(args.rows, row * args.hidden + channel);
    acc = args.weights != nullptr ? fmaf(args.weights[choice], value, acc) : acc + value;
  }
  if (args.shared_rows != nullptr) {
    const float value = load_element<kRow>(args.shared_rows, token * args.hidden + channel);
    acc = args.shared_weights != nullptr ? fmaf(args.shared_weights[token], value, acc) : acc + value;
  }
  store_element<kOut>(args.out, token * args.hidden + channel, acc);
}

template <DType kRow>
void launch(const CombineArgs& args, DType out, dim3 grid, cudaStream_t stream) {
  switch (out) {
    case DType::kF32: combine_tokens<kRow, DType::kF32><<<grid, kThreads, 0, stream>>>(args); return;
    case DType::kF16: combine_tokens<kRow, DType::kF16><<<grid, kThreads, 0, stream>>>(args); return;
    default: combine_tokens<kRow, DType::kBf16><<<grid, kThreads, 0, stream>>>(args); return;
  }
}

}  // namespace

void combine(const HostCall& call) {
  const Batch& batch = call.batch;
  const MoeConfig& config = call.weights.config;
  if (batch.tokens == 0) return;
  CombineArgs args{};
  args.rows = call.buffers.routed.rows_out;
  args.shared_rows = call.buffers.shared.experts > 0 ? call.buffers.shared.rows_out : nullptr;
  args.row_of_choice = call.buffers.row_of_choice;
  args.weights = config->router_weight == RouterWeight::kAfterDown ? batch.topk_weights : nullptr;
  args.shared_weights = batch.shared_weights;
  args.out = batch.out;
  args.top_k = config->top_k;
  args.hidden = config->hidden_size;
  const dim3 grid(static_cast<unsigned>(batch.tokens),
                  static_cast<unsigned>((config->hidden_size + kThreads - 1) / kThreads));
  auto* const stream = static_cast<cudaStream_t>(call.stream);
  if (config->row_format == RowFormat::kBf16)
    launch<DType::kBf16>(args, batch.out_dtype, grid, stream);
  else
    launch<DType::kF32>(args, batch.out_dtype, grid, stream);
}

}  // namespace nvfp4_moe::cuda
