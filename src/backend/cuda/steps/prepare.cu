// route and quantize as one kernel: CTA 0 routes, and each token has one more CTA. A token's CTA
// finds out itself whether the token has a row. It writes its counts to a separate array, since CTA
// 0 clears the status at the same time.
#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/route.cuh"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal::cuda {
namespace {

// The work on a token's activations.
enum class RowWork { kRound, kQuantize, kQuantizeVec8 };

// Vec: the format that rows are quantized to. CTAs have two dimensions: the threads that a row
// needs, and enough of these for route. Only the first of the second dimension works on a row.
template <DType kType, RowWork kWork, class Vec>
__global__ void __launch_bounds__(kRouteLargeThreads, 1)
    route_and_quantize_kernel(RouteArgs route, RowArgs rows, RowCounts* token_counts) {
  extern __shared__ uint4 route_shared[];
  ptx::grid_dependency_wait();
  // not earlier: sm90's gemm1 reads the batch's arrays as soon as it starts
  ptx::launch_dependents();
  if (blockIdx.x == 0) {
    route_by_one_cta(route, route_shared);
    return;
  }
  if (threadIdx.y != 0) return;
  const int64_t token = blockIdx.x - 1;
  bool has_row = route.shared_row_offsets != nullptr;
  uint32_t bad = 0;
#pragma unroll 1
  for (int64_t assignment = token * route.top_k; assignment < (token + 1) * route.top_k && !has_row;
       ++assignment)
    has_row = local_expert(route, assignment, route.assignments, bad) >= 0;
  RowCounts& own = token_counts[token];
  rows.counters = {&own.nonfinite, &own.blocks, &own.saturated, &own.zeroed};
  if (threadIdx.x == 0) own = RowCounts{};
  __syncthreads();
  if constexpr (kWork == RowWork::kRound)
    round_row<kType>(rows, token, has_row);
  else if constexpr (kWork == RowWork::kQuantize)
    quantize_row<kType, Vec>(rows, token, has_row);
  else if (has_row)
    quantize_vec8_row<Vec>(rows, token, load_vec8(rows, token, threadIdx.x));
  else
    expect_row(rows, token, false, ThreadGroup::cta());
}

template <DType kType>
Status launch_prepare(const StepContext& step, const RouteArgs& route, const RowArgs& rows,
                      RowCounts* token_counts) {
  const RoutePlan& plan = step.plan->route;
  const auto ctas = static_cast<unsigned>(1 + step.batch.tokens);
  const auto threads = static_cast<unsigned>(step.plan->hidden.threads);
  const dim3 shape(threads, std::max(1u, static_cast<unsigned>(plan.threads) / threads));
  const auto launch_as = [&]<RowWork kWork, class Vec>() {
    return launch<route_and_quantize_kernel<kType, kWork, Vec>>("route_and_quantize", ctas, shape,
                                                                plan.shared_bytes, step.stream,
                                                                route, rows, token_counts);
  };
  const auto quantize_to = [&]<class Vec>() {
    if constexpr (kType == DType::kBf16)
      if (step.plan->hidden.kernel == QuantizeKernel::kVec8Cta)
        return launch_as.template operator()<RowWork::kQuantizeVec8, Vec>();
    return launch_as.template operator()<RowWork::kQuantize, Vec>();
  };
  if (step.plan->hidden.kernel == QuantizeKernel::kRound)
    return launch_as.template operator()<RowWork::kRound, Vec8>();
  return is_fp8(step) ? quantize_to.template operator()<E4m3Vec8>()
                      : quantize_to.template operator()<Vec8>();
}

}  // namespace

Status route_and_quantize(const StepContext& step, int32_t* cleared) {
  static_assert(kRouteSmallThreads <= kRowThreads &&
                kAssignmentsPerThread * kRouteLargeThreads / 2 >= kOneCtaAssignments);
  const RouteArgs route = route_args(step, cleared);
  const RowArgs rows = hidden_args(step, step.buffers.routed);
  RowCounts* const counts = Scratch(step).token_counts;
  switch (step.batch.hidden_dtype) {
    case DType::kF32: return launch_prepare<DType::kF32>(step, route, rows, counts);
    case DType::kF16: return launch_prepare<DType::kF16>(step, route, rows, counts);
    default: return launch_prepare<DType::kBf16>(step, route, rows, counts);
  }
}

}  // namespace nvfp4_moe::internal::cuda
