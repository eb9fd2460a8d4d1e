// One block a token: its line is read once and written, as it is, rounded or quantized, to each of its rows.
#include <cuda_runtime.h>

#include <type_traits>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/steps.h"
#include "backend/sm90/gather.h"
#include "backend/sm90/variant.h"

namespace nvfp4_moe::sm90 {
namespace {

constexpr int kGatherThreads = 128;
constexpr int kMostRows = 8;  // of a token at a time

// Where a token's line goes.
struct RowsOfTokens {
  uint4* rows;     // (R, pieces)
  uint8_t* flags;  // (R), cleared
  const int32_t* row_of_assignment;
  int32_t top_k, pieces;  // of 16 bytes
};

template <class Read>
__device__ void write_rows(const RowsOfTokens& to, int64_t token, const Read& read) {
  for (int32_t first = 0; first < to.top_k; first += kMostRows) {
    int32_t row[kMostRows];
    bool any = false;
#pragma unroll
    for (int k = 0; k < kMostRows; ++k) {
      row[k] = first + k < to.top_k ? to.row_of_assignment[token * to.top_k + first + k] : -1;
      any |= row[k] >= 0;
      if (row[k] >= 0 && threadIdx.x == 0) to.flags[row[k]] = 0;
    }
    if (!any) continue;
#pragma unroll 4
    for (auto i = static_cast<int32_t>(threadIdx.x); i < to.pieces; i += kGatherThreads) {
      const uint4 piece = read(token * to.pieces + i);
#pragma unroll
      for (int k = 0; k < kMostRows; ++k)
        if (row[k] >= 0) to.rows[int64_t{row[k]} * to.pieces + i] = piece;
    }
  }
}

__global__ void __launch_bounds__(kGatherThreads) sm90_gather_rows(const uint4* x, RowsOfTokens to) {
  cuda::wait_for_previous();
  cuda::let_next_start();  // gemm1 relies on route as soon as it starts
  write_rows(to, blockIdx.x, [&](int64_t piece) { return x[piece]; });
}

// round_lines, but for where the line goes.
template <DType kType>
__global__ void __launch_bounds__(kGatherThreads) sm90_round_into_rows(cuda::LineArgs args, RowsOfTokens to) {
  cuda::wait_for_previous();
  cuda::let_next_start();  // gemm1 relies on route as soon as it starts
  const int64_t token = blockIdx.x;
  if (threadIdx.x == 0) args.out.nonfinite[token] = 0;
  uint32_t magnitude = 0;
  write_rows(to, token, [&](int64_t piece) {
    float x[8];
    uint32_t words[4];
    cuda::load_elements<kType>(args.x, piece * 8, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      magnitude = max(magnitude, max(cuda::magnitude_bits(x[2 * j]), cuda::magnitude_bits(x[2 * j + 1])));
      words[j] = uint32_t{cuda::bf16_from_float(x[2 * j])} | uint32_t{cuda::bf16_from_float(x[2 * j + 1])} << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  });
  if (!__syncthreads_or(magnitude >= cuda::kInfBits)) return;
  if (threadIdx.x == 0) args.out.nonfinite[token] = 1;
  cuda::count_line(args.counters.nonfinite, 1, cuda::Team::block());
}

// quantize by eights, but for where the operand goes. Requantize clears the flags.
struct OperandRows {
  const RowsOfTokens& to;
  int64_t token;
  __device__ bool any() const {
    bool any = false;
#pragma unroll 8
    for (int32_t k = 0; k < to.top_k; ++k) any |= to.row_of_assignment[token * to.top_k + k] >= 0;
    return any;
  }
  __device__ void put(int64_t i, const uint4& eight) const {
#pragma unroll 8
    for (int32_t k = 0; k < to.top_k; ++k) {
      const int32_t row = to.row_of_assignment[token * to.top_k + k];
      if (row >= 0) to.rows[int64_t{row} * to.pieces + i] = eight;
    }
  }
};
__global__ void __launch_bounds__(cuda::kEightsThreads) sm90_quantize_into_rows(cuda::LineArgs args, RowsOfTokens to) {
  cuda::wait_for_previous();
  cuda::let_next_start();  // gemm1 relies on route as soon as it starts
  const OperandRows rows{to, blockIdx.x};
  if (!rows.any()) return cuda::expect_line(args, rows.token, false, cuda::Team::block());
  cuda::quantize_line_by_eights(args, rows.token, cuda::read_eight(args, rows.token, threadIdx.x), rows);
}
// The same, a warp a token.
__global__ void __launch_bounds__(cuda::kWarpLineThreads, 4)
    sm90_quantize_into_rows_by_warps(cuda::LineArgs args, int64_t tokens, RowsOfTokens to) {
  cuda::wait_for_previous();
  cuda::let_next_start();  // gemm1 relies on route as soon as it starts
  const OperandRows rows{to, (int64_t{blockIdx.x} * cuda::kWarpLineThreads + threadIdx.x) / 32};
  if (rows.token >= tokens) return;
  if (!rows.any()) return cuda::expect_line(args, rows.token, false, cuda::Team::warp());
  cuda::quantize_line_by_warp(args, rows.token, cuda::read_eight(args, rows.token, cuda::Team::warp().rank), rows);
}

RowsOfTokens rows_of_tokens(const StepContext& step, const PartBuffers& part) {
  const MoeConfig& config = step.weights.config;
  return {reinterpret_cast<uint4*>(gathered(part)), part.intermediate.nonfinite, step.buffers.row_of_assignment,
          static_cast<int32_t>(config->top_k), static_cast<int32_t>(config->hidden_size / 8)};
}

}  // namespace

const uint16_t* gather_rows(const StepContext& step, const PartBuffers& part, const uint16_t* x) {
  cuda::launch<sm90_gather_rows>(static_cast<unsigned>(step.batch.tokens), kGatherThreads, 0, step.stream,
                                 reinterpret_cast<const uint4*>(x), rows_of_tokens(step, part));
  return gathered(part);
}

bool quantizes_into_rows(const StepContext& step) {
  const MoeConfig& config = step.weights.config;
  const Variant& variant = kVariants[routed_variant(config, step.weights.range, step.batch.tokens)];
  return variant.tensor_lines && step.buffers.shared.experts == 0 && !cuda::routes_and_quantizes_at_once(step) &&
         (config->activation_format == ActivationFormat::kBf16 ||
          cuda::quantizes_by_eights(cuda::hidden_lines(step), step.batch.hidden_dtype));
}

void quantize_into_rows(const StepContext& step) {
  if (!quantizes_into_rows(step)) return cuda::quantize(step);
  const auto tokens = static_cast<unsigned>(step.batch.tokens);
  const cuda::LineArgs lines = cuda::hidden_lines(step);
  const RowsOfTokens rows = rows_of_tokens(step, step.buffers.routed);
  const bool nvfp4 = step.weights.config->activation_format == ActivationFormat::kNvfp4;
  if (nvfp4 && cuda::by_warps(step.batch.tokens))
    return cuda::launch<sm90_quantize_into_rows_by_warps>(
        static_cast<unsigned>(cuda::ceil_div(step.batch.tokens, cuda::kWarpLineThreads / 32)), cuda::kWarpLineThreads,
        0, step.stream, lines, step.batch.tokens, rows);
  if (nvfp4)
    return cuda::launch<sm90_quantize_into_rows>(tokens, cuda::eights_threads(lines.k, step.batch.tokens), 0,
                                                 step.stream, lines, rows);
  const auto launch = [&](auto type) {
    cuda::launch<sm90_round_into_rows<type.value>>(tokens, kGatherThreads, 0, step.stream, lines, rows);
  };
  switch (step.batch.hidden_dtype) {
    case DType::kF32: return launch(std::integral_constant<DType, DType::kF32>{});
    case DType::kF16: return launch(std::integral_constant<DType, DType::kF16>{});
    default: return launch(std::integral_constant<DType, DType::kBf16>{});
  }
}

}  // namespace nvfp4_moe::sm90
