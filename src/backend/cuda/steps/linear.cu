// A dense linear as two steps of a layer. To quantize, x is the hidden of a layer whose tokens all have rows; to gemm2,
// the lines are the intermediate of a layer with nothing but a shared expert, of which there is nothing but `down`:
//
//   packed: tensor scales of one expert (256 bytes) | tiles of down (rows, cols)
//
// The layer is one of bf16 activations either way: the operand is bf16 already, and a line's scale, NaN where the line
// is flagged, comes with it. gemm2 writes y itself where it can: bf16 or fp32, aligned, and as many rows as a layer may
// have hidden channels, which are multiples of 16. Else it writes fp32 into the workspace, some tokens at a time, and a
// last kernel rounds them.
#include <cuda_runtime.h>

#include <algorithm>

#include "backend/cuda/device/device.h"
#include "backend/cuda/packed_layout.h"
#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/linear.h"
#include "backend/cuda/steps/pack.h"

namespace nvfp4_moe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kTilesOffset = 256;    // where PackedLayout of no routed expert has the shared one
constexpr int64_t kStagedTokens = 1024;  // of y in fp32
constexpr ExpertRange kNoExperts{0, 0};

int64_t channels_of(int64_t rows) { return ceil_div(rows, 16) * 16; }

// x to the layer that quantizes it: cols channels.
Result<MoeConfig> line_config(const LinearWeights& weights) {
  MoeOptions options;
  options.num_experts = options.top_k = 1;
  options.hidden_size = weights.cols;
  options.intermediate_size = 16;
  options.shared_intermediate_size = 16;
  options.activation_format = weights.activation_format;
  options.activation_scale = weights.activation_scale;
  return MoeConfig::make(options);
}
// The lines to the layer that multiplies them.
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

// The workspace. T tokens, K cols.
struct LinearArrays {
  int64_t* row_offsets = nullptr;  // (2) 0, tokens of the product
  RunStatus* status = nullptr;
  ActivationBuffers lines;      // (T, K)
  float* row_scale = nullptr;   // (T)
  uint16_t* operand = nullptr;  // (T, K) bf16
  float* staged = nullptr;      // (min(T, kStagedTokens), channels)
  Arena scratch;                // of quantize's and gemm2's steps, which come one after the other

  LinearArrays(const LinearWeights& weights, int64_t tokens, size_t scratch_bytes, Arena& arena) {
    row_offsets = arena.take<int64_t>("linear.", "row_offsets", 2);
    status = arena.take<RunStatus>("linear.", "status", 1);
    lines.nonfinite = arena.take<uint8_t>("linear.", "nonfinite", tokens);
    row_scale = take<float>(tokens);
    operand = arena.take<uint16_t>("linear.", "operand", tokens * weights.cols);
    if (weights.activation_format == ActivationFormat::kNvfp4) {
      lines.codes = arena.take<uint8_t>("linear.", "codes", tokens * weights.cols / 2);
      lines.block_scales = arena.take<uint8_t>("linear.", "block_scales", tokens * weights.cols / 16);
      lines.row_scale = row_scale;
    } else {
      lines.bf16 = operand;
    }
    staged = arena.take<float>("linear.", "staged", std::min(tokens, kStagedTokens) * channels_of(weights.rows));
    scratch = Arena(arena.take<std::byte>("linear.", "scratch", static_cast<int64_t>(scratch_bytes)));
  }
};

// Before a product of `rows` lines.
__global__ void linear_begin(int64_t* row_offsets, int64_t rows, int32_t* cleared, int32_t cleared_count) {
  if (threadIdx.x == 0) row_offsets[0] = 0, row_offsets[1] = rows;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < cleared_count; i += kThreads) cleared[i] = 0;
}

// The scales of bf16 lines: 1, NaN where the line is flagged.
__global__ void __launch_bounds__(kThreads) linear_flags(const uint8_t* nonfinite, int64_t lines, float* row_scale) {
  const int64_t line = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (line < lines) row_scale[line] = nonfinite[line] != 0 ? __uint_as_float(0x7FC00000u) : 1.0f;
}

// (lines, channels) fp32 to (lines, rows), each rounded once.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    linear_store(const float* staged, int64_t lines, int64_t channels, int64_t rows, void* out) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= lines * rows) return;
  store_element<kType>(out, index, staged[index / rows * channels + index % rows]);
}

void store(const LinearBatch& batch, int64_t first, int64_t count, int64_t channels, int64_t rows, const float* staged,
           cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(count * rows, kThreads));
  auto* const out = static_cast<std::byte*>(batch.out) + first * rows * (bits(batch.out_dtype) / 8);
  switch (batch.out_dtype) {
    case DType::kF32:
      linear_store<DType::kF32><<<blocks, kThreads, 0, stream>>>(staged, count, channels, rows, out);
      return;
    case DType::kF16:
      linear_store<DType::kF16><<<blocks, kThreads, 0, stream>>>(staged, count, channels, rows, out);
      return;
    default: linear_store<DType::kBf16><<<blocks, kThreads, 0, stream>>>(staged, count, channels, rows, out);
  }
}

size_t scratch_bytes(const LinearSteps& steps, const MoeConfig& product, const MoeConfig& line, int64_t tokens) {
  Arena of_line, of_product;
  Scratch(line, kNoExperts, 0, of_line);
  steps.take_scratch(product, kNoExperts, tokens, of_product);
  return std::max(of_product.size_bytes(), of_line.size_bytes());
}

}  // namespace

size_t linear_bytes(int64_t rows, int64_t cols) {
  return static_cast<size_t>(kTilesOffset + down_tiles(rows, cols).bytes());
}

Status linear_pack(LinearWeights& weights, const Nvfp4View& source) {
  if (weights.activation_format == ActivationFormat::kInt8Block)
    return unsupported("activation_format int8_block: int8 tensor cores have no scale per 16 elements");
  NVFP4_MOE_TRY(line_config(weights).status().in("linear"));
  NVFP4_MOE_TRY(product_config(weights, RowFormat::kFp32).status().in("linear"));
  weights.tensor_scale = source.tensor_scale;
  const TensorScales scales{1.0f, 1.0f, source.tensor_scale};
  NVFP4_MOE_TRY(to_device(weights.device, weights.bytes.data(), &scales, sizeof(scales), nullptr));
  return pack_matrix(weights.device, source, weights.bytes.data() + kTilesOffset);
}

size_t linear_workspace_bytes(const LinearSteps& steps, const LinearWeights& weights, int64_t max_tokens) {
  // linear_pack has made both.
  const MoeConfig line = *line_config(weights), product = *product_config(weights, RowFormat::kFp32);
  Arena arena;
  LinearArrays(weights, max_tokens, scratch_bytes(steps, product, line, max_tokens), arena);
  return arena.size_bytes();
}

Status linear_run(const LinearSteps& steps, const LinearWeights& weights, const LinearBatch& batch,
                  std::byte* workspace, const RunContext& context) {
  const int64_t tokens = batch.tokens;
  if (tokens == 0) return {};
  const DeviceGuard guard(weights.device);
  NVFP4_MOE_TRY(guard.status());
  const int64_t channels = channels_of(weights.rows);
  const bool direct =
      channels == weights.rows && batch.out_dtype != DType::kF16 && reinterpret_cast<uintptr_t>(batch.out) % 16 == 0;
  const RowFormat row_format = direct && batch.out_dtype == DType::kBf16 ? RowFormat::kBf16 : RowFormat::kFp32;
  NVFP4_MOE_ASSIGN(const MoeConfig line, line_config(weights));
  NVFP4_MOE_ASSIGN(const MoeConfig product, product_config(weights, row_format));
  Arena arena(workspace);
  const LinearArrays arrays(weights, tokens, scratch_bytes(steps, product, line, tokens), arena);
  auto* const stream = static_cast<cudaStream_t>(context.stream);
  NVFP4_MOE_TRY(check(cudaMemsetAsync(arrays.status, 0, sizeof(RunStatus), stream), "linear"));

  {  // Quantize finds its operand first in its scratch.
    const PackedWeights nothing{line, kNoExperts, LayerScales{weights.input_scale, {}}, {}, {}, weights.device};
    Batch lines;
    lines.tokens = tokens;
    lines.hidden = batch.x;
    lines.hidden_dtype = batch.x_dtype;
    LayerBuffers buffers;
    buffers.status = arrays.status;
    buffers.hidden = arrays.lines;
    buffers.shared.experts = 1;  // so that every token has a row
    quantize({nothing, lines, buffers, serial_executor(), Arena(reinterpret_cast<std::byte*>(arrays.operand)),
              context.stream});
  }
  if (weights.activation_format == ActivationFormat::kBf16)
    linear_flags<<<static_cast<unsigned>(ceil_div(tokens, kThreads)), kThreads, 0, stream>>>(arrays.lines.nonfinite,
                                                                                             tokens, arrays.row_scale);

  const PackedWeights packed{
      product, kNoExperts, {}, {}, Buffer(weights.bytes.data(), weights.bytes.size_bytes(), {}), weights.device};
  const int64_t most = direct ? tokens : kStagedTokens;
  for (int64_t first = 0; first < tokens; first += most) {
    Batch rows;
    rows.tokens = std::min(most, tokens - first);
    LayerBuffers buffers;
    PartBuffers& part = buffers.shared;
    part.experts = 1;
    part.intermediate_size = weights.cols;
    part.down_only = true;
    part.row_offsets = arrays.row_offsets;
    part.intermediate.bf16 = arrays.operand + first * weights.cols;
    part.intermediate.row_scale = arrays.row_scale + first;
    part.rows_out = direct ? batch.out : arrays.staged;
    const StepContext step{packed, rows, buffers, serial_executor(), arrays.scratch, context.stream};
    const Tiling tiling = steps.tiling(step);
    linear_begin<<<1, kThreads, 0, stream>>>(arrays.row_offsets, rows.tokens, tiling.cleared, tiling.cleared_count);
    steps.gemm2(step, part);
    if (!direct) store(batch, first, rows.tokens, channels, weights.rows, arrays.staged, stream);
  }
  return check_launch("linear");
}

}  // namespace nvfp4_moe::cuda
