// The kernels of quantize and requantize, and their launches.
#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal::cuda {
namespace {

// Vec: the format, Vec8 of NVFP4 or E4m3Vec8.
template <class Vec, DType kType>
__global__ void __launch_bounds__(kRowThreads) quantize_any_type(RowArgs args) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not earlier: gemm1 relies on route as soon as it starts
  quantize_row<kType, Vec>(args, blockIdx.x, wanted(args, blockIdx.x));
}
template <class Vec>
__global__ void __launch_bounds__(kVec8Threads) quantize_vec8_cta(RowArgs args) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not earlier: gemm1 relies on route as soon as it starts
  if (wanted(args, blockIdx.x))
    quantize_vec8_row<Vec>(args, blockIdx.x, load_vec8(args, blockIdx.x, threadIdx.x));
  else
    expect_row(args, blockIdx.x, false, ThreadGroup::cta());
}
// The same with one warp per token.
template <class Vec>
__global__ void __launch_bounds__(kWarpRowThreads, 4)
    quantize_vec8_warp(RowArgs args, int64_t tokens) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not earlier: gemm1 relies on route as soon as it starts
  const int64_t token = (int64_t{blockIdx.x} * kWarpRowThreads + threadIdx.x) / 32;
  if (token >= tokens) return;
  const ThreadGroup group = ThreadGroup::warp();
  if (wanted(args, token))
    quantize_vec8_row_by_warp<Vec>(args, token, load_vec8(args, token, group.rank),
                                   OperandRow<Vec>(args, token));
  else
    expect_row(args, token, false, group);
}
// Requantizes rows, of which there may be far fewer than the bound. A CTA takes every gridDim.x-th
// row and loads one row ahead.
template <class Vec>
__global__ void __launch_bounds__(kVec8Threads) requantize_vec8_cta(RowArgs args) {
  ptx::launch_dependents();
  // route has ended before gemm1 lets this kernel start
  const int64_t rows = __ldcg(args.row_count);
  ptx::grid_dependency_wait();
  int64_t row = blockIdx.x;
  if (row >= rows) return;
  uint4 first = load_vec8(args, row, threadIdx.x);
#pragma unroll 1
  while (true) {
    const int64_t next = row + gridDim.x;
    const uint4 ahead = next < rows ? load_vec8(args, next, threadIdx.x) : first;
    quantize_vec8_row<Vec>(args, row, first);
    if (next >= rows) return;
    __syncthreads();  // the next row uses the same shared array
    row = next;
    first = ahead;
  }
}
// The same with one warp per row. The next row's first vec8 is loaded while the warp works on this
// one.
template <class Vec>
__global__ void __launch_bounds__(kWarpRowThreads, 4) requantize_vec8_warp(RowArgs args) {
  ptx::launch_dependents();
  const int64_t rows = __ldcg(args.row_count), warps = int64_t{gridDim.x} * (kWarpRowThreads / 32);
  ptx::grid_dependency_wait();
  int64_t row = (int64_t{blockIdx.x} * kWarpRowThreads + threadIdx.x) / 32;
  const int lane = ThreadGroup::warp().rank;
  uint4 first = row < rows ? load_vec8(args, row, lane) : uint4{};
#pragma unroll 1
  while (row < rows) {
    const int64_t next = row + warps;
    const uint4 ahead = next < rows ? load_vec8(args, next, lane) : first;
    quantize_vec8_row_by_warp<Vec>(args, row, first, OperandRow<Vec>(args, row));
    row = next;
    first = ahead;
  }
}
template <DType kType>
__global__ void __launch_bounds__(kRowThreads) round_rows(RowArgs args) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not earlier: gemm1 relies on route as soon as it starts
  round_row<kType>(args, blockIdx.x, wanted(args, blockIdx.x));
}

// Under bf16 the intermediate is multiplied as it is, so `nonfinite` stays 0: a NaN reaches the
// accumulators anyway.
__global__ void __launch_bounds__(kRowThreads) count_nonfinite_rows(RowArgs args) {
  ptx::launch_dependents();
  ptx::grid_dependency_wait();
  const int64_t row = blockIdx.x;
  if (!wanted(args, row)) return;
  if (threadIdx.x == 0) args.out.nonfinite[row] = 0;
  if (row_magnitude<DType::kBf16>(args, row * args.k) >= kInfBits)
    count_once(args.counters.nonfinite, 1, ThreadGroup::cta());
}

template <class Vec, DType kType>
Status launch_hidden(const StepContext& step, const QuantizePlan& plan, const RowArgs& args) {
  const auto ctas = static_cast<unsigned>(plan.ctas);
  switch (plan.kernel) {
    case QuantizeKernel::kVec8Warp:
      return launch<quantize_vec8_warp<Vec>>("quantize", ctas, plan.threads, 0, step.stream, args,
                                             step.batch.tokens);
    case QuantizeKernel::kVec8Cta:
      return launch<quantize_vec8_cta<Vec>>("quantize", ctas, plan.threads, 0, step.stream, args);
    case QuantizeKernel::kAnyType:
      return launch<quantize_any_type<Vec, kType>>("quantize", ctas, plan.threads, 0, step.stream,
                                                   args);
    default: return launch<round_rows<kType>>("quantize", ctas, plan.threads, 0, step.stream, args);
  }
}

template <class Vec>
Status launch_hidden(const StepContext& step, const QuantizePlan& plan, const RowArgs& args) {
  switch (step.batch.hidden_dtype) {
    case DType::kF32: return launch_hidden<Vec, DType::kF32>(step, plan, args);
    case DType::kF16: return launch_hidden<Vec, DType::kF16>(step, plan, args);
    default: return launch_hidden<Vec, DType::kBf16>(step, plan, args);
  }
}
Status launch_hidden(const StepContext& step, const QuantizePlan& plan, const RowArgs& args) {
  return is_fp8(step) ? launch_hidden<E4m3Vec8>(step, plan, args)
                      : launch_hidden<Vec8>(step, plan, args);
}

template <class Vec>
Status launch_requantize(const StepContext& step, const QuantizePlan& plan, const RowArgs& args) {
  const auto ctas = static_cast<unsigned>(plan.ctas);
  switch (plan.kernel) {
    case QuantizeKernel::kCountNonfinite:
      return launch<count_nonfinite_rows>("count_nonfinite_rows", ctas, plan.threads, 0,
                                          step.stream, args);
    case QuantizeKernel::kVec8Warp:
      return launch<requantize_vec8_warp<Vec>>("requantize", ctas, plan.threads, 0, step.stream,
                                               args);
    case QuantizeKernel::kVec8Cta:
      return launch<requantize_vec8_cta<Vec>>("requantize", ctas, plan.threads, 0, step.stream,
                                              args);
    default:
      return launch<quantize_any_type<Vec, DType::kBf16>>("requantize", ctas, plan.threads, 0,
                                                          step.stream, args);
  }
}

}  // namespace

Status quantize(const StepContext& step) {
  if (step.batch.tokens == 0) return {};
  RowArgs args = hidden_args(step, step.buffers.routed);
  if (step.buffers.shared.experts == 0 || step.plan->scale_hidden)
    args.row_of_assignment = step.buffers.row_of_assignment;
  args.top_k = step.weights.config->top_k;
  return launch_hidden(step, step.plan->hidden, args);
}

Status quantize_shared_hidden(const StepContext& step) {
  return launch_hidden(step, step.plan->shared_hidden, hidden_args(step, step.buffers.shared));
}

Status requantize(const StepContext& step, const PartBuffers& part) {
  const QuantizePlan& plan = plan_of(step, part).requantize;
  if (plan.kernel == QuantizeKernel::kNone || plan.kernel == QuantizeKernel::kByGemm2) return {};
  const RowArgs args = intermediate_args(step, part);
  return is_fp8(step) ? launch_requantize<E4m3Vec8>(step, plan, args)
                      : launch_requantize<Vec8>(step, plan, args);
}

}  // namespace nvfp4_moe::internal::cuda
