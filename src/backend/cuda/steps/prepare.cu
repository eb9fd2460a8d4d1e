// route and quantize as one kernel: block 0 routes, one block more for each token. A token's block sees for itself
// whether the token has a row, and leaves what it counts beside the status, which block 0 clears meanwhile.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/route.cuh"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::cuda {
namespace {

// What becomes of a line.
enum class LineWork { kRound, kQuantize, kQuantizeByEights };

// Blocks of (threads of a line) x (as many of these as route wants); a line has the first of them.
template <DType kType, LineWork kWork>
__global__ void __launch_bounds__(OneBlock::kManyThreads, 1)
    route_and_quantize_kernel(RouteArgs route, LineArgs lines, LineCounts* token_counts) {
  extern __shared__ uint4 route_shared[];
  wait_for_previous();
  let_next_start();  // not before: sm90's gemm1 reads what the batch points at as soon as it starts
  if (blockIdx.x == 0) {
    route_by_one_block(route, route_shared);
    return;
  }
  if (threadIdx.y != 0) return;
  const int64_t token = blockIdx.x - 1;
  bool has_row = route.shared_row_offsets != nullptr;
  uint32_t bad = 0;
#pragma unroll 1
  for (int64_t choice = token * route.top_k; choice < (token + 1) * route.top_k && !has_row; ++choice)
    has_row = local_expert(route, choice, route.choices, bad) >= 0;
  LineCounts& own = token_counts[token];
  lines.counters = {&own.nonfinite, &own.blocks, &own.saturated, &own.zeroed};
  if (threadIdx.x == 0) own = LineCounts{};
  __syncthreads();
  if constexpr (kWork == LineWork::kRound)
    round_line<kType>(lines, token, has_row);
  else if constexpr (kWork == LineWork::kQuantize)
    quantize_line<kType>(lines, token, has_row);
  else if (has_row)
    quantize_line_by_eights(lines, token, read_eight(lines, token, threadIdx.x));
  else
    expect_line(lines, token, false, Team::block());
}

template <DType kType>
void launch_prepare(const StepContext& step, RouteArgs route, const LineArgs& lines, LineCounts* token_counts) {
  const OneBlock block(route);
  const auto blocks = static_cast<unsigned>(1 + step.batch.tokens);
  const auto launch_as = [&](auto work, unsigned threads) {
    const unsigned of_route = std::max(1u, block.threads / threads);
    launch<route_and_quantize_kernel<kType, work.value>>(blocks, dim3(threads, of_route), block.shared_bytes,
                                                         step.stream, route, lines, token_counts);
  };
  if (step.weights.config->activation_format != ActivationFormat::kNvfp4)
    return launch_as(std::integral_constant<LineWork, LineWork::kRound>{}, kLineThreads);
  if constexpr (kType == DType::kBf16)
    if (quantizes_by_eights(lines, kType))
      return launch_as(std::integral_constant<LineWork, LineWork::kQuantizeByEights>{},
                       std::max<unsigned>(kLineThreads, eights_threads(lines.k, step.batch.tokens)));
  launch_as(std::integral_constant<LineWork, LineWork::kQuantize>{}, kLineThreads);
}

}  // namespace

bool routes_and_quantizes_at_once(const StepContext& step) {
  return step.batch.tokens > 0 && step.batch.tokens * step.weights.config->top_k <= kRouteOneBlock;
}

void route_and_quantize(const StepContext& step, const Tiling& tiling) {
  static_assert(OneBlock::kFewThreads <= kLineThreads &&
                OneBlock::kMostPer * OneBlock::kManyThreads / 2 >= kRouteOneBlock);
  const RouteArgs route = route_args(step, tiling);
  const LineArgs lines = hidden_lines(step);
  LineCounts* const counts = Scratch(step).token_counts;
  switch (step.batch.hidden_dtype) {
    case DType::kF32: return launch_prepare<DType::kF32>(step, route, lines, counts);
    case DType::kF16: return launch_prepare<DType::kF16>(step, route, lines, counts);
    default: return launch_prepare<DType::kBf16>(step, route, lines, counts);
  }
}

}  // namespace nvfp4_moe::cuda
