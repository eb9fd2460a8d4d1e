// A dense linear, run as two steps of a layer. For quantize, x is the hidden of a layer in which
// every token has a row. For gemm2, the quantized rows are the intermediate of a layer that has
// only a shared expert, of which only `down` exists:
//
//   packed: tensor scales and shifts of one expert (256 bytes) | tiles of down (rows, cols)
//
// The second layer always has bf16 activations: its operand (operand.h) already exists, and comes
// with row scales, NaN if the row is nonfinite. gemm2 writes y directly if y is bf16 or fp32,
// aligned, and its number of features is a valid hidden size (a multiple of 16). Otherwise it
// writes fp32 into the workspace, kStagedTokens tokens at a time, and a last kernel rounds them.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/layer.h"
#include "backend/cuda/pack/fp8_pack.h"
#include "backend/cuda/pack/pack.h"
#include "backend/cuda/packed_layout.h"
#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kLinearThreads = 256;
// offset of the shared expert in a PackedLayout without routed experts
constexpr int64_t kTilesOffset = 256;
constexpr int64_t kStagedTokens = 1024;  // rows of y in fp32
constexpr ExpertRange kNoExperts{0, 0};

int64_t channels_of(int64_t rows) { return ceil_div(rows, 16) * 16; }

// The layer that quantizes x: cols channels.
Result<MoeConfig> x_config(const LinearWeights& weights) {
  MoeOptions options;
  options.num_experts = options.top_k = 1;
  options.hidden_size = weights.cols;
  options.intermediate_size = 16;
  options.shared_intermediate_size = 16;
  options.activation_format = weights.activation_format;
  options.activation_scale = weights.activation_scale;
  return MoeConfig::make(options);
}
// The layer that multiplies the quantized rows.
Result<MoeConfig> product_config(const LinearWeights& weights, RowFormat row_format) {
  MoeOptions options;
  options.num_experts = options.top_k = 1;
  options.hidden_size = channels_of(weights.rows);
  options.intermediate_size = 16;
  options.shared_intermediate_size = weights.cols;
  options.activation_format = ActivationFormat::kBf16;
  options.row_format = row_format;
  return MoeConfig::make(options);
}

// The checkpoint scale from which a layer derives the linear's own scale. Under fp8 and static,
// that is already a power of two s, the smallest with 2688 input_scale <= 448 s. s / 8 gives it,
// since 2688 / 8 is 336.
float checkpoint_scale(const LinearWeights& weights) {
  const bool power_of_two = weights.activation_scale == ActivationScale::kStatic;
  return weights.activation_format == ActivationFormat::kFp8 && power_of_two
             ? weights.input_scale / 8
             : weights.input_scale;
}

// The workspace. T tokens, K cols.
struct LinearArrays {
  int64_t* row_offsets = nullptr;  // (2) 0 and the tokens of the product
  RunStatus* status = nullptr;
  ActivationBuffers rows;        // (T, K)
  float* row_scale = nullptr;    // (T)
  std::byte* operand = nullptr;  // (T, K): rows of operand_row_bytes
  float* staged = nullptr;       // (min(T, kStagedTokens), channels)
  Arena scratch;                 // for the steps quantize and gemm2, which run one after the other

  LinearArrays(const LinearWeights& weights, const RunPlan& run, size_t scratch_bytes,
               Arena& arena) {
    const int64_t tokens = run.tokens;
    row_offsets = arena.take<int64_t>("linear.", "row_offsets", 2);
    status = arena.take<RunStatus>("linear.", "status", 1);
    rows.nonfinite = arena.take<uint8_t>("linear.", "nonfinite", tokens);
    row_scale = arena.take<float>("linear.", "row_scale", tokens);
    operand = arena.take<std::byte>("linear.", "operand",
                                    tokens * operand_row_bytes(run.operand, weights.cols));
    if (weights.activation_format == ActivationFormat::kBf16) {
      rows.bf16 = reinterpret_cast<uint16_t*>(operand);
    } else {
      rows.row_scale = row_scale;
    }
    if (weights.activation_format == ActivationFormat::kNvfp4) {
      rows.codes = arena.take<uint8_t>("linear.", "codes", tokens * weights.cols / 2);
      rows.block_scales =
          arena.take<uint8_t>("linear.", "block_scales", tokens * weights.cols / 16);
    }
    staged = arena.take<float>("linear.", "staged",
                               std::min(tokens, kStagedTokens) * channels_of(weights.rows));
    scratch =
        Arena(arena.take<std::byte>("linear.", "scratch", static_cast<int64_t>(scratch_bytes)));
  }
};

// Runs before a product of that many rows.
__global__ void linear_begin(int64_t* row_offsets, int64_t rows, int32_t* cleared,
                             int32_t cleared_count) {
  if (threadIdx.x == 0) row_offsets[0] = 0, row_offsets[1] = rows;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < cleared_count; i += kLinearThreads)
    cleared[i] = 0;
}

// The scales of bf16 rows: 1, or NaN if the row is nonfinite.
__global__ void __launch_bounds__(kLinearThreads)
    linear_flags(const uint8_t* nonfinite, int64_t rows, float* row_scale) {
  const int64_t row = int64_t{blockIdx.x} * kLinearThreads + threadIdx.x;
  if (row < rows) row_scale[row] = nonfinite[row] != 0 ? __uint_as_float(0x7FC00000u) : 1.0f;
}

// (tokens, channels) fp32 to (tokens, features), each value rounded once.
template <DType kType>
__global__ void __launch_bounds__(kLinearThreads)
    linear_store(const float* staged, int64_t tokens, int64_t channels, int64_t features,
                 void* out) {
  const int64_t index = int64_t{blockIdx.x} * kLinearThreads + threadIdx.x;
  if (index >= tokens * features) return;
  store_element<kType>(out, index, staged[index / features * channels + index % features]);
}

Status store(const LinearBatch& batch, int64_t first, int64_t count, int64_t channels, int64_t rows,
             const float* staged, cudaStream_t stream) {
  const auto ctas = static_cast<unsigned>(ceil_div(count * rows, kLinearThreads));
  auto* const out = static_cast<std::byte*>(batch.out) + first * rows * (bits(batch.out_dtype) / 8);
  switch (batch.out_dtype) {
    case DType::kF32:
      linear_store<DType::kF32>
          <<<ctas, kLinearThreads, 0, stream>>>(staged, count, channels, rows, out);
      break;
    case DType::kF16:
      linear_store<DType::kF16>
          <<<ctas, kLinearThreads, 0, stream>>>(staged, count, channels, rows, out);
      break;
    default:
      linear_store<DType::kBf16>
          <<<ctas, kLinearThreads, 0, stream>>>(staged, count, channels, rows, out);
  }
  return check_launch("linear_store");
}

// Both layers of a linear with that many tokens.
struct Linear {
  MoeConfig row, product;

  // linear_pack has already made both configs successfully.
  Linear(const LinearWeights& weights, RowFormat row_format)
      : row(*x_config(weights)), product(*product_config(weights, row_format)) {}
  RunPlan plan(const Architecture& architecture, const LinearWeights& weights,
               const RunFacts& facts) const {
    return make_linear_plan(architecture.gemms, row, product, weights.facts, facts);
  }
  size_t scratch_bytes(const Architecture& architecture, const RunPlan& run) const {
    Arena arena;
    architecture.take_scratch(product, kNoExperts, run, arena);
    return arena.size_bytes();
  }
};

}  // namespace

size_t linear_bytes(int64_t rows, int64_t cols) {
  return static_cast<size_t>(kTilesOffset + down_tiles(rows, cols).bytes());
}

Status linear_pack(const TileFormat& format, LinearWeights& weights, const Nvfp4View& source) {
  if (weights.activation_format == ActivationFormat::kInt8Block)
    return unsupported(
        "activation_format int8_block: int8 tensor cores have no scale per 16 elements");
  NVFP4_MOE_TRY(x_config(weights).status().in("linear"));
  NVFP4_MOE_TRY(product_config(weights, RowFormat::kFp32).status().in("linear"));
  weights.tensor_scale = source.tensor_scale;
  if (weights.activation_format == ActivationFormat::kFp8)
    weights.fp8 = measure_fp8_weights(source);
  NVFP4_MOE_ASSIGN(const DeviceScales numbers,
                   device_scales({1.0f, 1.0f, source.tensor_scale}, {{}, {}, weights.fp8}));
  static_assert(offsetof(DeviceScales, shifts) == sizeof(TensorScales),
                "as fp8_shifts_offset of no routed expert");
  NVFP4_MOE_TRY(
      to_device(weights.device, weights.bytes.data(), &numbers, sizeof(numbers), nullptr));
  return pack_matrix(format, weights.device, source, weights.fp8.shift,
                     weights.bytes.data() + kTilesOffset);
}

size_t linear_workspace_bytes(const Architecture& architecture, const LinearWeights& weights,
                              int64_t max_tokens) {
  const Linear linear(weights, RowFormat::kFp32);
  const RunPlan run = linear.plan(architecture, weights, {.tokens = max_tokens});
  Arena arena;
  LinearArrays(weights, run, linear.scratch_bytes(architecture, run), arena);
  return arena.size_bytes();
}

Status linear_run(const Architecture& architecture, const LinearWeights& weights,
                  const LinearBatch& batch, std::byte* workspace, const RunContext& context) {
  const int64_t tokens = batch.tokens;
  if (tokens == 0) return {};
  const DeviceGuard guard(weights.device);
  NVFP4_MOE_TRY(guard.status());
  const int64_t channels = channels_of(weights.rows);
  const bool direct = channels == weights.rows && batch.out_dtype != DType::kF16 &&
                      reinterpret_cast<uintptr_t>(batch.out) % 16 == 0;
  const Linear linear(
      weights, direct && batch.out_dtype == DType::kBf16 ? RowFormat::kBf16 : RowFormat::kFp32);
  Batch hidden;
  hidden.tokens = tokens;
  hidden.hidden = batch.x;
  hidden.hidden_dtype = batch.x_dtype;
  const RunPlan run = linear.plan(architecture, weights, RunFacts::of(hidden));
  Arena arena(workspace);
  const LinearArrays arrays(weights, run, linear.scratch_bytes(architecture, run), arena);
  auto* const stream = static_cast<cudaStream_t>(context.stream);
  NVFP4_MOE_TRY(check(cudaMemsetAsync(arrays.status, 0, sizeof(RunStatus), stream), "linear"));

  {  // quantize expects its operand at the start of its scratch.
    const PackedWeights nothing{linear.row, kNoExperts, LayerScales{checkpoint_scale(weights), {}},
                                {},         {},         weights.device};
    LayerBuffers buffers;
    buffers.status = arrays.status;
    buffers.routed.hidden = arrays.rows;
    buffers.shared.experts = 1;  // so that every token has a row
    NVFP4_MOE_TRY(quantize({nothing, hidden, buffers, serial_executor(), Arena(arrays.operand),
                            context.stream, &run}));
  }
  if (weights.activation_format == ActivationFormat::kBf16) {
    linear_flags<<<static_cast<unsigned>(ceil_div(tokens, kLinearThreads)), kLinearThreads, 0,
                   stream>>>(arrays.rows.nonfinite, tokens, arrays.row_scale);
    NVFP4_MOE_TRY(check_launch("linear_flags"));
  }

  const PackedWeights packed{linear.product,
                             kNoExperts,
                             {},
                             {},
                             Buffer(weights.bytes.data(), weights.bytes.size_bytes(), {}),
                             weights.device};
  const int64_t most = direct ? tokens : kStagedTokens;
  for (int64_t first = 0; first < tokens; first += most) {
    Batch rows;
    rows.tokens = std::min(most, tokens - first);
    const RunPlan product = linear.plan(architecture, weights, {.tokens = rows.tokens});
    LayerBuffers buffers;
    PartBuffers& part = buffers.shared;
    part.experts = 1;
    part.intermediate_size = weights.cols;
    part.down_only = true;
    part.row_offsets = arrays.row_offsets;
    std::byte* const operand =
        arrays.operand + first * operand_row_bytes(run.operand, weights.cols);
    part.intermediate.codes = reinterpret_cast<uint8_t*>(operand);
    part.intermediate.row_scale = arrays.row_scale + first;
    part.rows_out = direct ? batch.out : arrays.staged;
    const StepContext step{packed,         rows,           buffers, serial_executor(),
                           arrays.scratch, context.stream, &product};
    linear_begin<<<1, kLinearThreads, 0, stream>>>(arrays.row_offsets, rows.tokens,
                                                   architecture.counters(step),
                                                   product.route.cleared_counters);
    NVFP4_MOE_TRY(check_launch("linear_begin"));
    NVFP4_MOE_TRY(architecture.gemm2(step, part));
    if (!direct)
      NVFP4_MOE_TRY(
          store(batch, first, rows.tokens, channels, weights.rows, arrays.staged, stream));
  }
  return {};
}

}  // namespace nvfp4_moe::internal::cuda
