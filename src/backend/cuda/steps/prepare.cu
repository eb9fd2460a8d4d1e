// route and quantize as one kernel: CTA 0 routes, and there is one more CTA for each token. A token's CTA finds out by
// itself whether the token has a row, and leaves its counts beside the status, which CTA 0 clears meanwhile. A run of few
// tokens that brings router logits selects its experts in the same kernel.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/route.cuh"
#include "backend/cuda/steps/select_experts.cuh"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::cuda {
namespace {

// What is done with a token's activations.
enum class RowWork { kRound, kQuantize, kQuantizeVec8 };

// What a token's CTA does: its activations, where it has a row.
template <DType kType, RowWork kWork>
__device__ void quantize_token(RowArgs& rows, RowCounts* token_counts, int64_t token, bool has_row) {
  RowCounts& own = token_counts[token];
  rows.counters = {&own.nonfinite, &own.blocks, &own.saturated, &own.zeroed};
  if (threadIdx.x == 0) own = RowCounts{};
  __syncthreads();
  if constexpr (kWork == RowWork::kRound)
    round_row<kType>(rows, token, has_row);
  else if constexpr (kWork == RowWork::kQuantize)
    quantize_row<kType>(rows, token, has_row);
  else if (has_row)
    quantize_vec8_row(rows, token, load_vec8(rows, token, threadIdx.x));
  else
    expect_row(rows, token, false, ThreadGroup::cta());
}

// CTAs of (threads that a row takes) x (as many of these as route wants); a row is done by the first of them.
template <DType kType, RowWork kWork>
__global__ void __launch_bounds__(kRouteLargeThreads, 1)
    route_and_quantize_kernel(RouteArgs route, RowArgs rows, RowCounts* token_counts) {
  extern __shared__ uint4 route_shared[];
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not before: sm90's gemm1 reads what the batch points at as soon as it starts
  if (blockIdx.x == 0) {
    route_by_one_cta(route, route_shared);
    return;
  }
  if (threadIdx.y != 0) return;
  const int64_t token = blockIdx.x - 1;
  bool has_row = route.shared_row_offsets != nullptr;
  uint32_t bad = 0;
#pragma unroll 1
  for (int64_t assignment = token * route.top_k; assignment < (token + 1) * route.top_k && !has_row; ++assignment)
    has_row = local_expert(route, assignment, route.assignments, bad) >= 0;
  quantize_token<kType, kWork>(rows, token_counts, token, has_row);
}

// What else a run that selects its experts has.
struct SelectArgs {
  SelectExperts call;
  bool by_lane_vectors;  // of kLogitsPerLane experts
  bool vectors;          // of experts_a_lane
};

__device__ void write_selection(const SelectArgs& select, int64_t token) {
  switch (router::experts_a_lane(select.call.config.num_experts)) {
    case 1: return select_token<1>(select.call, token, select.vectors);
    case 2: return select_token<2>(select.call, token, select.vectors);
    case 4: return select_token<4>(select.call, token, select.vectors);
    default: return select_token<8>(select.call, token, select.vectors);
  }
}

// The same where the experts are those of the largest logits. Whoever needs them selects them for itself, so that nobody
// waits for another; one CTA more for each token writes them down and weighs them.
template <DType kType, RowWork kWork>
__global__ void __launch_bounds__(kVec8Threads, 1)
    select_route_and_quantize_kernel(const __grid_constant__ SelectArgs select, RouteArgs route, RowArgs rows,
                                     RowCounts* token_counts) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not before, as above
  const int64_t token = static_cast<int64_t>(blockIdx.x) - 1;
  if (token >= select.call.tokens) {
    if (thread_of_cta() < 32) write_selection(select, token - select.call.tokens);
    return;
  }
  const int64_t id = ids_by_logits(select.call, select.by_lane_vectors);
  if (token < 0) {
    route_small_batch(route, SmallBatch(route, id, route.tile_n));
    return;
  }
  if (threadIdx.y != 0) return;
  uint32_t bad = 0;
  const bool own = static_cast<int64_t>(SmallBatch::lane()) / route.top_k == token && local_expert(route, id, bad) >= 0;
  const bool has_row = route.shared_row_offsets != nullptr || __any_sync(kAllLanes, own);
  quantize_token<kType, kWork>(rows, token_counts, token, has_row);
}

template <DType kType>
Status launch_prepare(const StepContext& step, const RouteArgs& route, const RowArgs& rows, RowCounts* token_counts) {
  const RoutePlan& plan = step.plan->route;
  const auto threads = static_cast<unsigned>(step.plan->hidden.threads);
  const dim3 shape(threads, std::max(1u, static_cast<unsigned>(plan.threads) / threads));
  const auto launch_as = [&](auto work) {
    const auto ctas = static_cast<unsigned>(1 + step.batch.tokens);
    if (step.plan->selection != Selection::kFused)
      return launch<route_and_quantize_kernel<kType, work.value>>("route_and_quantize", ctas, shape, plan.shared_bytes,
                                                                  step.stream, route, rows, token_counts);
    const SelectExperts& call = *step.batch.selection;
    const int per_lane = router::experts_a_lane(call.config.num_experts);
    const SelectArgs select = {call, reads_vectors(call, kLogitsPerLane), reads_vectors(call, per_lane)};
    return launch<select_route_and_quantize_kernel<kType, work.value>>(
        "select_route_and_quantize", ctas + static_cast<unsigned>(call.tokens), shape, 0, step.stream, select, route,
        rows, token_counts);
  };
  switch (step.plan->hidden.kernel) {
    case QuantizeKernel::kRound: return launch_as(std::integral_constant<RowWork, RowWork::kRound>{});
    case QuantizeKernel::kVec8Cta:
      if constexpr (kType == DType::kBf16) return launch_as(std::integral_constant<RowWork, RowWork::kQuantizeVec8>{});
      [[fallthrough]];
    default: return launch_as(std::integral_constant<RowWork, RowWork::kQuantize>{});
  }
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

}  // namespace nvfp4_moe::cuda
