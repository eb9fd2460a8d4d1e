#include "backend/cpu/gemm.h"

#include <limits>

namespace nvfp4_moe::internal::cpu {

namespace {

// acc times 2^-shift of each panel. Exact, since no product is below 2^-18 times 2^shift, far from
// fp32's smallest numbers.
void undo_fp8_shifts(const Strip& strip, int64_t rows, float* acc) {
  for (int64_t p = 0; p < strip.panels; ++p) {
    const int shift = strip.fp8_shift[static_cast<size_t>(p)];
    if (shift == 0) continue;
    const float factor = std::ldexp(1.0f, -shift);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t r = 0; r < kPanelRows; ++r)
        acc[(i * strip.panels + p) * kPanelRows + r] *= factor;
  }
}

}  // namespace

float row_alpha(const ActivationBuffers& activations, int64_t row, double matrix_scale) {
  if (activations.nonfinite[row] != 0) return std::numeric_limits<float>::quiet_NaN();
  if (activations.row_scale == nullptr) return static_cast<float>(matrix_scale);
  return static_cast<float>(static_cast<double>(activations.row_scale[row]) * matrix_scale);
}

void prefetch_rows(const RowBlock& block, const Operands& operands) {
  // the first strip loads them; prefetching would only delay its weights
  constexpr int64_t kUnprefetchedRows = 8;
  if (block.count <= kUnprefetchedRows) return;
  for (int64_t i = 0; i < block.count; ++i)
    for (int64_t byte = 0; byte < operands.row_bytes; byte += 64)
      __builtin_prefetch(block.rows[i] + byte, 0, 2);
}

void multiply(const Kernels& kernels, const Operands& operands, const Strip& strip,
              RowBlock& block) {
  kernels.multiplication(operands.format)
      .multiply(strip,
                {.rows = block.rows,
                 .count = block.count,
                 .k = operands.k,
                 .same_bits = operands.same_bits,
                 .for_single_row = operands.for_single_row},
                block.acc);
  if (operands.format == ActivationFormat::kFp8) undo_fp8_shifts(strip, block.count, block.acc);
}

RoundRows rows_of_block(const RowBlock& block, int64_t panels, void* out, DType dtype,
                        int64_t channels, int64_t row, int64_t channel, const float* bias) {
  const int64_t width = dtype == DType::kF32 ? 4 : 2;
  return {.acc = block.acc,
          .acc_stride = panels * kPanelRows,
          .count = block.count,
          .channels = std::min(panels * kPanelRows, channels - channel),
          .alpha = block.alpha[0],
          .bias = bias == nullptr ? nullptr : bias + channel,
          .out = static_cast<std::byte*>(out) + (row * channels + channel) * width,
          .dtype = dtype,
          .stride = channels};
}

}  // namespace nvfp4_moe::internal::cpu
