// A dense NVFP4 linear: x (T, cols), W (rows, cols) -> y (T, rows), y = x W^T.
//
// Packed: codes (rows, cols/2), then block scales (rows, cols/16). Activations are quantized like a
// layer's hidden. One rounding of the exact value to y's type; under bf16, of the double sum times
// the tensor scale. A token with NaN or Inf gives NaN.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "backend/reference/dots.h"
#include "backend/reference/epilogue.h"
#include "backend/reference/fp8_weights.h"
#include "backend/reference/quantize_row.h"
#include "backend/reference/steps.h"

namespace nvfp4_moe::internal::reference {
namespace {

// The converted input in the workspace. T tokens.
struct LinearArrays {
  ActivationBuffers input;

  LinearArrays(Arena& arena, const LinearWeights& weights, int64_t tokens) {
    switch (weights.activation_format) {
      case ActivationFormat::kNvfp4:
        input.row_scale = arena.take<float>("x", ".row_scale", tokens);  // (T)
        // (T, cols/2)
        input.codes = arena.take<uint8_t>("x", ".codes", tokens * (weights.cols / 2));
        input.block_scales = arena.take<uint8_t>("x", ".block_scales",
                                                 tokens * (weights.cols / 16));  // (T, cols/16)
        break;
      case ActivationFormat::kBf16:
        input.bf16 = arena.take<uint16_t>("x", ".bf16", tokens * weights.cols);  // (T, cols)
        break;
      case ActivationFormat::kFp8:
        input.row_scale = arena.take<float>("x", ".row_scale", tokens);       // (T)
        input.fp8 = arena.take<uint8_t>("x", ".fp8", tokens * weights.cols);  // (T, cols)
        break;
      case ActivationFormat::kInt8Block:
        // (T, cols/16)
        input.int8_scales = arena.take<float>("x", ".int8_scales", tokens * (weights.cols / 16));
        // (T, cols)
        input.int8_codes = arena.take<int8_t>("x", ".int8_codes", tokens * weights.cols);
        break;
    }
    input.nonfinite = arena.take<uint8_t>("x", ".nonfinite", tokens);  // (T)
  }
};

Matrix packed_matrix(const LinearWeights& weights) {
  const auto* codes = reinterpret_cast<const uint8_t*>(weights.bytes.data());
  return {Nvfp4View::contiguous(codes, codes + weights.rows * (weights.cols / 2),
                                weights.tensor_scale, weights.rows, weights.cols),
          weights.fp8.shift};
}

template <class Accumulator>
void output_tile(const Matrix& weight, const LinearBatch& batch, const ActivationBuffers& input,
                 int64_t n0) {
  const int64_t n_end = std::min<int64_t>(n0 + kTileN, weight.rows);
  constexpr int kRows = Tile<Accumulator>::kRows;
  for (int64_t token0 = 0; token0 < batch.tokens; token0 += kRows) {
    const int count = static_cast<int>(std::min<int64_t>(kRows, batch.tokens - token0));
    int64_t tokens[kRows];
    for (int m = 0; m < count; ++m) tokens[m] = token0 + m;
    Tile<Accumulator> tile;
    dots(input, tokens, count, weight, n0, tile);
    for (int m = 0; m < count; ++m) {
      for (int64_t n = n0; n < n_end; ++n) {
        const double value = input.nonfinite[tokens[m]] != 0
                                 ? std::nan("")
                                 : epilogue(input, tokens[m], tile.sum[m][n - n0], weight,
                                            format_of(batch.out_dtype));
        store(batch.out, batch.out_dtype, tokens[m] * weight.rows + n, value);
      }
    }
  }
}

}  // namespace

size_t linear_bytes(int64_t rows, int64_t cols) {
  // 1/2 + 1/16 byte per element; rows * cols fits whenever the array itself does.
  return static_cast<size_t>(rows) * static_cast<size_t>(cols / 2 + cols / 16);
}

Status linear_pack(LinearWeights& weights, const Nvfp4View& source) {
  weights.tensor_scale = source.tensor_scale;
  if (weights.activation_format == ActivationFormat::kFp8) weights.fp8 = define_fp8_weights(source);
  auto* codes = reinterpret_cast<uint8_t*>(weights.bytes.data());
  uint8_t* block_scales = codes + weights.rows * (weights.cols / 2);
  for (int64_t r = 0; r < weights.rows; ++r) {
    std::memcpy(codes + r * (weights.cols / 2), source.row_codes(r),
                static_cast<size_t>(weights.cols / 2));
    std::memcpy(block_scales + r * (weights.cols / 16), source.row_scales(r),
                static_cast<size_t>(weights.cols / 16));
  }
  return {};
}

size_t linear_workspace_bytes(const LinearWeights& weights, int64_t max_tokens) {
  Arena arena;
  LinearArrays(arena, weights, max_tokens);
  return arena.size_bytes();
}

Status linear_run(const LinearWeights& weights, const LinearBatch& batch, std::byte* workspace,
                  const RunContext& context) {
  const bool has_row_scales = row_scale_range(weights.activation_format) > 0;
  ScalePolicy policy;
  if (weights.activation_scale == ActivationScale::kStatic)
    policy = {ScalePolicy::kPowerOfTwo, weights.input_scale};
  if (weights.activation_scale == ActivationScale::kVllmOrder)
    policy = {ScalePolicy::kVllmOrder, weights.input_scale};
  if (has_row_scales && policy.kind != ScalePolicy::kDynamicToken &&
      !(policy.scale > 0 && std::isfinite(policy.scale)))
    return invalid_argument("linear input_scale: expected a finite positive number, got " +
                            std::to_string(policy.scale));
  Arena arena(workspace);
  const ActivationBuffers input = LinearArrays(arena, weights, batch.tokens).input;
  auto quantize_rows = [&](int64_t begin, int64_t end) {
    RowCounts counts;
    for (int64_t t = begin; t < end; ++t) {
      convert_row(weights.activation_format, batch.x, batch.x_dtype, t * weights.cols, weights.cols,
                  policy, input, t, counts);
    }
  };
  context.executor->parallel_for(batch.tokens, 4, std::ref(quantize_rows));

  const Matrix weight = packed_matrix(weights);
  auto multiply = [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      with_accumulator(weights.activation_format, [&]<class Accumulator>() {
        output_tile<Accumulator>(weight, batch, input, tile * kTileN);
      });
    }
  };
  context.executor->parallel_for((weights.rows + kTileN - 1) / kTileN, 1, std::ref(multiply));
  return {};
}

}  // namespace nvfp4_moe::internal::reference
