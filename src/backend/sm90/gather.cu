// Copies activations into expert order: a token is read once and written to each of its rows, as it
// is, rounded, or quantized. One cta or one warp per token.
#include <cuda_runtime.h>

#include <type_traits>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/steps.h"
#include "backend/sm90/config.h"
#include "backend/sm90/gather.h"
#include "backend/sm90/steps.h"

namespace nvfp4_moe::internal::sm90 {
namespace {

constexpr int kGatherThreads = cuda::kIntoRowsThreads;
constexpr int kRowsAtOnce = 8;  // of a token

// The destination of tokens.
struct RowsOfTokens {
  std::byte* rows;                   // (R) rows of the run's operand
  uint8_t* nonfinite_rows;           // (R) cleared
  const int32_t* row_of_assignment;  // (T, top_k), -1: no row
  int32_t top_k;
  int32_t vectors;  // 16-byte vectors per row: 8 bf16, or 16 E4M3
  __device__ std::byte* row(int32_t index) const { return rows + int64_t{index} * vectors * 16; }
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
    for (auto i = static_cast<int32_t>(threadIdx.x); i < to.vectors; i += kGatherThreads) {
      const uint4 vector = read(token * to.vectors + i);
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k)
        if (row[k] >= 0) reinterpret_cast<uint4*>(to.row(row[k]))[i] = vector;
    }
  }
}

__global__ void __launch_bounds__(kGatherThreads)
    sm90_gather_rows(const uint4* x, RowsOfTokens to) {
  cuda::ptx::grid_dependency_wait();
  cuda::ptx::launch_dependents();  // gemm1 relies on route as soon as it starts
  write_rows(to, blockIdx.x, [&](int64_t vector) { return x[vector]; });
}

// round_row with another destination.
template <DType kType>
__global__ void __launch_bounds__(kGatherThreads)
    sm90_round_into_rows(cuda::RowArgs args, RowsOfTokens to) {
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
      magnitude =
          max(magnitude, max(cuda::magnitude_bits(x[2 * j]), cuda::magnitude_bits(x[2 * j + 1])));
      words[j] = uint32_t{cuda::bf16_from_float(x[2 * j])} |
                 uint32_t{cuda::bf16_from_float(x[2 * j + 1])} << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  });
  if (!__syncthreads_or(magnitude >= cuda::kInfBits)) return;
  if (threadIdx.x == 0) args.out.nonfinite[token] = 1;
  cuda::count_once(args.counters.nonfinite, 1, cuda::ThreadGroup::cta());
}

// Vec8s per output row: bf16, or E4M3 with its padding.
template <class Vec>
__device__ int64_t vec8s_of(const cuda::RowArgs& args) {
  return std::is_same_v<Vec, cuda::E4m3Vec8> ? cuda::fp8_row_vec8s(args.k) : args.k / 8;
}
// quantize_vec8_cta with another destination. Requantize clears nonfinite_rows.
template <class Vec>
struct OperandRows {
  const RowsOfTokens& to;
  int64_t token;
  int64_t vec8s;  // per row, including padding
  __device__ bool any() const {
    bool any = false;
#pragma unroll 8
    for (int32_t k = 0; k < to.top_k; ++k) any |= to.row_of_assignment[token * to.top_k + k] >= 0;
    return any;
  }
  __device__ bool pads(int64_t i) const { return i < vec8s; }
  __device__ void put(int64_t i, const Vec& vec8) const {
#pragma unroll 8
    for (int32_t k = 0; k < to.top_k; ++k) {
      const int32_t row = to.row_of_assignment[token * to.top_k + k];
      if (row < 0) continue;
      if constexpr (std::is_same_v<Vec, cuda::E4m3Vec8>)
        cuda::put_e4m3(to.row(row), cuda::Operand::kE4m3, i, vec8);
      else
        reinterpret_cast<uint4*>(to.row(row))[i] = vec8.operand;
    }
  }
};
template <class Vec>
__global__ void __launch_bounds__(cuda::kVec8Threads)
    sm90_quantize_into_rows(cuda::RowArgs args, RowsOfTokens to) {
  cuda::ptx::grid_dependency_wait();
  cuda::ptx::launch_dependents();  // gemm1 relies on route as soon as it starts
  const OperandRows<Vec> rows{to, blockIdx.x, vec8s_of<Vec>(args)};
  if (!rows.any()) return cuda::expect_row(args, rows.token, false, cuda::ThreadGroup::cta());
  cuda::quantize_vec8_row<Vec>(args, rows.token, cuda::load_vec8(args, rows.token, threadIdx.x),
                               rows);
}
// The same with one warp per token.
template <class Vec>
__global__ void __launch_bounds__(cuda::kWarpRowThreads, 4)
    sm90_quantize_into_rows_by_warps(cuda::RowArgs args, int64_t tokens, RowsOfTokens to) {
  cuda::ptx::grid_dependency_wait();
  cuda::ptx::launch_dependents();  // gemm1 relies on route as soon as it starts
  const OperandRows<Vec> rows{to, (int64_t{blockIdx.x} * cuda::kWarpRowThreads + threadIdx.x) / 32,
                              vec8s_of<Vec>(args)};
  if (rows.token >= tokens) return;
  if (!rows.any()) return cuda::expect_row(args, rows.token, false, cuda::ThreadGroup::warp());
  cuda::quantize_vec8_row_by_warp<Vec>(
      args, rows.token, cuda::load_vec8(args, rows.token, cuda::ThreadGroup::warp().rank), rows);
}

RowsOfTokens rows_of_tokens(const StepContext& step, const PartBuffers& part) {
  const MoeConfig& config = step.weights.config;
  return {
      gathered(part), part.intermediate.nonfinite, step.buffers.row_of_assignment,
      static_cast<int32_t>(config->top_k),
      static_cast<int32_t>(cuda::operand_row_bytes(step.plan->operand, config->hidden_size) / 16)};
}

}  // namespace

Status gather_rows(const StepContext& step, const PartBuffers& part, const std::byte* x) {
  return cuda::launch<sm90_gather_rows>(
      "gather_rows", static_cast<unsigned>(step.batch.tokens), kGatherThreads, 0, step.stream,
      reinterpret_cast<const uint4*>(x), rows_of_tokens(step, part));
}

namespace {

template <class Vec>
Status launch_into_rows(const StepContext& step, const cuda::RowArgs& args,
                        const RowsOfTokens& rows) {
  const cuda::QuantizePlan& plan = step.plan->hidden;
  const auto ctas = static_cast<unsigned>(plan.ctas);
  if (plan.kernel == cuda::QuantizeKernel::kVec8Warp)
    return cuda::launch<sm90_quantize_into_rows_by_warps<Vec>>(
        "quantize_into_rows", ctas, plan.threads, 0, step.stream, args, step.batch.tokens, rows);
  return cuda::launch<sm90_quantize_into_rows<Vec>>("quantize_into_rows", ctas, plan.threads, 0,
                                                    step.stream, args, rows);
}

}  // namespace

Status quantize_into_rows(const StepContext& step) {
  const cuda::QuantizePlan& plan = step.plan->hidden;
  const auto ctas = static_cast<unsigned>(plan.ctas);
  const cuda::RowArgs args = cuda::hidden_args(step, step.buffers.routed);
  const RowsOfTokens rows = rows_of_tokens(step, step.buffers.routed);
  if (plan.kernel != cuda::QuantizeKernel::kRound)
    return cuda::is_fp8(step) ? launch_into_rows<cuda::E4m3Vec8>(step, args, rows)
                              : launch_into_rows<cuda::Vec8>(step, args, rows);
  const auto launch = [&](auto type) {
    return cuda::launch<sm90_round_into_rows<type.value>>("round_into_rows", ctas, plan.threads, 0,
                                                          step.stream, args, rows);
  };
  switch (step.batch.hidden_dtype) {
    case DType::kF32: return launch(std::integral_constant<DType, DType::kF32>{});
    case DType::kF16: return launch(std::integral_constant<DType, DType::kF16>{});
    default: return launch(std::integral_constant<DType, DType::kBf16>{});
  }
}

}  // namespace nvfp4_moe::internal::sm90
