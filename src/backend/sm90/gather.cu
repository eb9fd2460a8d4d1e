// Activations into expert order: a token is read once and written, as it is, rounded or quantized, to each of its rows.
// One cta a token, or one warp.
#include <cuda_runtime.h>

#include <type_traits>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/steps.h"
#include "backend/sm90/config.h"
#include "backend/sm90/gather.h"
#include "backend/sm90/steps.h"

namespace nvfp4_moe::sm90 {
namespace {

constexpr int kGatherThreads = cuda::kIntoRowsThreads;
constexpr int kRowsAtOnce = 8;  // of a token

// Where tokens go.
struct RowsOfTokens {
  uint4* rows;                       // (R, vec8s) of 8 bf16
  uint8_t* nonfinite_rows;           // (R), cleared
  const int32_t* row_of_assignment;  // (T, top_k), -1: none
  int32_t top_k, vec8s;
};

template <class Read>
__device__ void write_rows(const RowsOfTokens& to, int64_t token, const Read& read) {
  for (int32_t first = 0; first < to.top_k; first += kRowsAtOnce) {
    int32_t row[kRowsAtOnce];
    bool any = false;
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      row[k] = first + k < to.top_k ? to.row_of_assignment[token * to.top_k + first + k] : -1;
      any |= row[k] >= 0;
      if (row[k] >= 0 && threadIdx.x == 0) to.nonfinite_rows[row[k]] = 0;
    }
    if (!any) continue;
#pragma unroll 4
    for (auto i = static_cast<int32_t>(threadIdx.x); i < to.vec8s; i += kGatherThreads) {
      const uint4 vec8 = read(token * to.vec8s + i);
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k)
        if (row[k] >= 0) to.rows[int64_t{row[k]} * to.vec8s + i] = vec8;
    }
  }
}

__global__ void __launch_bounds__(kGatherThreads) sm90_gather_rows(const uint4* x, RowsOfTokens to) {
  cuda::ptx::grid_dependency_wait();
  cuda::ptx::launch_dependents();  // gemm1 relies on route as soon as it starts
  write_rows(to, blockIdx.x, [&](int64_t vec8) { return x[vec8]; });
}

// round_rows, but for where the token goes.
template <DType kType>
__global__ void __launch_bounds__(kGatherThreads) sm90_round_into_rows(cuda::RowArgs args, RowsOfTokens to) {
  cuda::ptx::grid_dependency_wait();
  cuda::ptx::launch_dependents();  // gemm1 relies on route as soon as it starts
  const int64_t token = blockIdx.x;
  if (threadIdx.x == 0) args.out.nonfinite[token] = 0;
  uint32_t magnitude = 0;
  write_rows(to, token, [&](int64_t vec8) {
    float x[8];
    uint32_t words[4];
    cuda::load_elements<kType>(args.x, vec8 * 8, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      magnitude = max(magnitude, max(cuda::magnitude_bits(x[2 * j]), cuda::magnitude_bits(x[2 * j + 1])));
      words[j] = uint32_t{cuda::bf16_from_float(x[2 * j])} | uint32_t{cuda::bf16_from_float(x[2 * j + 1])} << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  });
  if (!__syncthreads_or(magnitude >= cuda::kInfBits)) return;
  if (threadIdx.x == 0) args.out.nonfinite[token] = 1;
  cuda::count_once(args.counters.nonfinite, 1, cuda::ThreadGroup::cta());
}

// quantize_vec8_cta, but for where the operand goes. Requantize clears nonfinite_rows.
struct OperandRows {
  const RowsOfTokens& to;
  int64_t token;
  __device__ bool any() const {
    bool any = false;
#pragma unroll 8
    for (int32_t k = 0; k < to.top_k; ++k) any |= to.row_of_assignment[token * to.top_k + k] >= 0;
    return any;
  }
  __device__ static bool pads(int64_t) { return false; }
  __device__ void put(int64_t i, const cuda::Vec8& vec8) const {
#pragma unroll 8
    for (int32_t k = 0; k < to.top_k; ++k) {
      const int32_t row = to.row_of_assignment[token * to.top_k + k];
      if (row >= 0) to.rows[int64_t{row} * to.vec8s + i] = vec8.operand;
    }
  }
};
__global__ void __launch_bounds__(cuda::kVec8Threads) sm90_quantize_into_rows(cuda::RowArgs args, RowsOfTokens to) {
  cuda::ptx::grid_dependency_wait();
  cuda::ptx::launch_dependents();  // gemm1 relies on route as soon as it starts
  const OperandRows rows{to, blockIdx.x};
  if (!rows.any()) return cuda::expect_row(args, rows.token, false, cuda::ThreadGroup::cta());
  cuda::quantize_vec8_row(args, rows.token, cuda::load_vec8(args, rows.token, threadIdx.x), rows);
}
// The same, a warp a token.
__global__ void __launch_bounds__(cuda::kWarpRowThreads, 4)
    sm90_quantize_into_rows_by_warps(cuda::RowArgs args, int64_t tokens, RowsOfTokens to) {
  cuda::ptx::grid_dependency_wait();
  cuda::ptx::launch_dependents();  // gemm1 relies on route as soon as it starts
  const OperandRows rows{to, (int64_t{blockIdx.x} * cuda::kWarpRowThreads + threadIdx.x) / 32};
  if (rows.token >= tokens) return;
  if (!rows.any()) return cuda::expect_row(args, rows.token, false, cuda::ThreadGroup::warp());
  cuda::quantize_vec8_row_by_warp(args, rows.token, cuda::load_vec8(args, rows.token, cuda::ThreadGroup::warp().rank),
                                  rows);
}

RowsOfTokens rows_of_tokens(const StepContext& step, const PartBuffers& part) {
  const MoeConfig& config = step.weights.config;
  return {reinterpret_cast<uint4*>(gathered(part)), part.intermediate.nonfinite, step.buffers.row_of_assignment,
          static_cast<int32_t>(config->top_k), static_cast<int32_t>(config->hidden_size / 8)};
}

}  // namespace

Status gather_rows(const StepContext& step, const PartBuffers& part, const uint16_t* x) {
  return cuda::launch<sm90_gather_rows>("gather_rows", static_cast<unsigned>(step.batch.tokens), kGatherThreads, 0,
                                        step.stream, reinterpret_cast<const uint4*>(x), rows_of_tokens(step, part));
}

Status quantize_into_rows(const StepContext& step) {
  const cuda::QuantizePlan& plan = step.plan->hidden;
  const auto ctas = static_cast<unsigned>(plan.ctas);
  const cuda::RowArgs args = cuda::hidden_args(step, step.buffers.routed);
  const RowsOfTokens rows = rows_of_tokens(step, step.buffers.routed);
  if (plan.kernel == cuda::QuantizeKernel::kVec8Warp)
    return cuda::launch<sm90_quantize_into_rows_by_warps>("quantize_into_rows", ctas, plan.threads, 0, step.stream,
                                                          args, step.batch.tokens, rows);
  if (plan.kernel == cuda::QuantizeKernel::kVec8Cta)
    return cuda::launch<sm90_quantize_into_rows>("quantize_into_rows", ctas, plan.threads, 0, step.stream, args, rows);
  const auto launch = [&](auto type) {
    return cuda::launch<sm90_round_into_rows<type.value>>("round_into_rows", ctas, plan.threads, 0, step.stream, args,
                                                          rows);
  };
  switch (step.batch.hidden_dtype) {
    case DType::kF32: return launch(std::integral_constant<DType, DType::kF32>{});
    case DType::kF16: return launch(std::integral_constant<DType, DType::kF16>{});
    default: return launch(std::integral_constant<DType, DType::kBf16>{});
  }
}

}  // namespace nvfp4_moe::sm90
