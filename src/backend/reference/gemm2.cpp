// gemm2: part.intermediate (R, I), down (H, I) -> part.rows_out (R, H) in row_format.
//
// One rounding of the exact value alpha * dot (nvfp4, int8_block, fp8), or of the double sum times
// the tensor scale (bf16), directly to bf16 or fp32. With biases: rounded to fp32, the bias added
// in fp32, and the result rounded to row_format. A nonfinite row is NaN.
#include <cmath>
#include <functional>

#include "backend/reference/dots.h"
#include "backend/reference/epilogue.h"
#include "backend/reference/steps.h"

namespace nvfp4_moe::internal::reference {
namespace {

template <class Accumulator>
void down_tile(const StepContext& step, const PartBuffers& part, int64_t expert, int64_t n0) {
  const MoeConfig& config = step.weights.config;
  const ActivationBuffers& intermediate = part.intermediate;
  const DType row_dtype = config->row_format == RowFormat::kBf16 ? DType::kBf16 : DType::kF32;
  const Matrix down = expert_matrices(step, part, expert).down;
  const float* bias = expert_biases(step, part, expert).down;
  const FloatFormat& format = bias == nullptr ? format_of(row_dtype) : kFp32;
  const int64_t end = part.row_offsets[expert + 1],
                n_end = std::min<int64_t>(n0 + kTileN, config->hidden_size);

  constexpr int kRows = Tile<Accumulator>::kRows;
  for (int64_t row0 = part.row_offsets[expert]; row0 < end; row0 += kRows) {
    const int count = static_cast<int>(std::min<int64_t>(kRows, end - row0));
    int64_t rows[kRows];
    for (int m = 0; m < count; ++m) rows[m] = row0 + m;
    Tile<Accumulator> tile;
    dots(intermediate, rows, count, down, n0, tile);
    for (int m = 0; m < count; ++m) {
      for (int64_t n = n0; n < n_end; ++n) {
        const double value =
            intermediate.nonfinite[rows[m]] != 0
                ? std::nan("")
                : add_bias(epilogue(intermediate, rows[m], tile.sum[m][n - n0], down, format), bias,
                           n);
        store(part.rows_out, row_dtype, rows[m] * config->hidden_size + n, value);
      }
    }
  }
}

}  // namespace

void gemm2(const StepContext& step, const PartBuffers& part) {
  const int64_t tiles = (step.weights.config->hidden_size + kTileN - 1) / kTileN;
  auto body = [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t expert = item / tiles, n0 = item % tiles * kTileN;
      with_accumulator(step.weights.config->activation_format, [&]<class Accumulator>() {
        down_tile<Accumulator>(step, part, expert, n0);
      });
    }
  };
  step.executor.parallel_for(part.experts * tiles, 1, std::ref(body));
}

}  // namespace nvfp4_moe::internal::reference
