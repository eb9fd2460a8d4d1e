// quantize's and requantize's kernels and their launches.
#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::cuda {
namespace {

template <DType kType>
__global__ void __launch_bounds__(kLineThreads) quantize_nvfp4(LineArgs args) {
  wait_for_previous();
  let_next_start();  // gemm1 may rely on route as soon as it starts
  quantize_line<kType>(args, blockIdx.x, wanted(args, blockIdx.x));
}
__global__ void __launch_bounds__(kEightsThreads) quantize_by_eights(LineArgs args) {
  wait_for_previous();
  let_next_start();  // gemm1 may rely on route as soon as it starts
  if (wanted(args, blockIdx.x))
    quantize_line_by_eights(args, blockIdx.x, read_eight(args, blockIdx.x, threadIdx.x));
  else
    expect_line(args, blockIdx.x, false, Team::block());
}
// The same, a warp a token.
__global__ void __launch_bounds__(kWarpLineThreads, 4) quantize_by_warps(LineArgs args, int64_t tokens) {
  wait_for_previous();
  let_next_start();  // gemm1 may rely on route as soon as it starts
  const int64_t token = (int64_t{blockIdx.x} * kWarpLineThreads + threadIdx.x) / 32;
  if (token >= tokens) return;
  const Team team = Team::warp();
  if (wanted(args, token))
    quantize_line_by_warp(args, token, read_eight(args, token, team.rank), OperandLine(args, token));
  else
    expect_line(args, token, false, team);
}
// Of rows, which may be far fewer than the bound: a block takes every gridDim.x-th and reads one ahead.
__global__ void __launch_bounds__(kEightsThreads) requantize_by_eights(LineArgs args) {
  let_next_start();
  const int64_t rows = __ldcg(args.line_count);  // route has ended before gemm1 lets this kernel start
  wait_for_previous();
  int64_t row = blockIdx.x;
  if (row >= rows) return;
  uint4 first = read_eight(args, row, threadIdx.x);
#pragma unroll 1
  while (true) {
    const int64_t next = row + gridDim.x;
    const uint4 ahead = next < rows ? read_eight(args, next, threadIdx.x) : first;
    quantize_line_by_eights(args, row, first);
    if (next >= rows) return;
    __syncthreads();  // the next row's magnitudes take the same place
    row = next;
    first = ahead;
  }
}
// The same, a warp each: the next row's first eight are on their way while it works on one.
__global__ void __launch_bounds__(kWarpLineThreads, 4) requantize_by_warps(LineArgs args) {
  let_next_start();
  const int64_t rows = __ldcg(args.line_count), warps = int64_t{gridDim.x} * (kWarpLineThreads / 32);
  wait_for_previous();
  int64_t row = (int64_t{blockIdx.x} * kWarpLineThreads + threadIdx.x) / 32;
  const int lane = Team::warp().rank;
  uint4 first = row < rows ? read_eight(args, row, lane) : uint4{};
#pragma unroll 1
  while (row < rows) {
    const int64_t next = row + warps;
    const uint4 ahead = next < rows ? read_eight(args, next, lane) : first;
    quantize_line_by_warp(args, row, first, OperandLine(args, row));
    row = next;
    first = ahead;
  }
}
// As many blocks as run at once, at 64 registers a thread.
unsigned resident_blocks(int64_t blocks, unsigned threads) {
  int device = 0, multiprocessors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  return static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{multiprocessors} * (kEightsThreads / threads)));
}

template <DType kType>
__global__ void __launch_bounds__(kLineThreads) round_lines(LineArgs args) {
  wait_for_previous();
  let_next_start();  // gemm1 may rely on route as soon as it starts
  round_line<kType>(args, blockIdx.x, wanted(args, blockIdx.x));
}

// The intermediate under bf16: multiplied as it is, so its flag stays 0.
__global__ void __launch_bounds__(kLineThreads) count_nonfinite_rows(LineArgs args) {
  let_next_start();
  wait_for_previous();
  const int64_t line = blockIdx.x;
  if (!wanted(args, line)) return;
  if (threadIdx.x == 0) args.out.nonfinite[line] = 0;
  if (line_magnitude<DType::kBf16>(args, line * args.k) >= kInfBits)
    count_line(args.counters.nonfinite, 1, Team::block());
}

template <DType kType>
void launch_hidden(const LineArgs& args, ActivationFormat format, int64_t lines, void* stream) {
  const auto blocks = static_cast<unsigned>(lines);
  if (format == ActivationFormat::kNvfp4 && quantizes_by_eights(args, kType) && by_warps(lines))
    launch<quantize_by_warps>(static_cast<unsigned>(ceil_div(lines, kWarpLineThreads / 32)), kWarpLineThreads, 0,
                              stream, args, lines);
  else if (format == ActivationFormat::kNvfp4 && quantizes_by_eights(args, kType))
    launch<quantize_by_eights>(blocks, eights_threads(args.k, lines), 0, stream, args);
  else if (format == ActivationFormat::kNvfp4)
    launch<quantize_nvfp4<kType>>(blocks, line_threads(args.k), 0, stream, args);
  else
    launch<round_lines<kType>>(blocks, line_threads(args.k), 0, stream, args);
}

}  // namespace

void quantize(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  const int64_t tokens = step.batch.tokens;
  if (tokens == 0) return;
  LineArgs args = hidden_lines(step);
  if (step.buffers.shared.experts == 0) args.row_of_assignment = step.buffers.row_of_assignment;
  args.top_k = config->top_k;
  switch (step.batch.hidden_dtype) {
    case DType::kF32: return launch_hidden<DType::kF32>(args, config->activation_format, tokens, step.stream);
    case DType::kF16: return launch_hidden<DType::kF16>(args, config->activation_format, tokens, step.stream);
    default: return launch_hidden<DType::kBf16>(args, config->activation_format, tokens, step.stream);
  }
}

namespace {
// Routed rows if every expert had as many.
int64_t local_rows(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  return step.batch.tokens * config->top_k * step.weights.range.count / config->num_experts;
}
}  // namespace

void requantize(const StepContext& step, const PartBuffers& part) {
  const MoeConfig& config = step.weights.config;
  const bool shared = &part == &step.buffers.shared;
  const int64_t rows = step.batch.tokens * (shared ? 1 : config->top_k);  // at most
  if (rows == 0) return;
  RunStatus& status = *step.buffers.status;
  const Scratch scratch(step);
  LineArgs args{};
  args.x = part.intermediate.bf16;
  args.k = part.intermediate_size;
  args.policy = config->intermediate_scale == IntermediateScale::kDynamicToken ? LineScale::kDynamic
                : config->intermediate_scale == IntermediateScale::kCompat     ? LineScale::kCompat
                                                                               : LineScale::kPowerOfTwo;
  args.rule = LineRule(args.policy, resolve_activation_scales(config, step.weights.scales)->intermediate);
  args.out = part.intermediate;
  args.operand = shared ? scratch.shared_operand : scratch.routed_operand;
  args.counters = {&status.nonfinite_rows, &status.intermediate_blocks, &status.intermediate_saturated,
                   &status.intermediate_zeroed};
  args.line_count = part.row_offsets + part.experts;
  const auto blocks = static_cast<unsigned>(rows);
  const unsigned threads = line_threads(args.k), by_eights = eights_threads(args.k, rows);
  if (config->activation_format != ActivationFormat::kNvfp4)
    launch<count_nonfinite_rows>(blocks, threads, 0, step.stream, args);
  else if (quantizes_by_eights(args, DType::kBf16) && by_warps(shared ? rows : local_rows(step)))
    launch<requantize_by_warps>(resident_blocks(ceil_div(rows, kWarpLineThreads / 32), kWarpLineThreads),
                                kWarpLineThreads, 0, step.stream, args);
  else if (quantizes_by_eights(args, DType::kBf16))
    launch<requantize_by_eights>(resident_blocks(rows, by_eights), by_eights, 0, step.stream, args);
  else
    launch<quantize_nvfp4<DType::kBf16>>(blocks, threads, 0, step.stream, args);
}

}  // namespace nvfp4_moe::cuda
