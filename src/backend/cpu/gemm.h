// Divides a GEMM's work over threads and caches: strips of 32 weight rows times row blocks of
// activations.
//
// A row block stays in L2 while a range of strips passes. A strip is read sequentially, which
// prefetches well, and multiplies 128 rows of activations, which are scattered and would otherwise
// come from L3 one by one.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>

#include "backend/cpu/kernels.h"
#include "backend/cpu/scratch.h"
#include "core/executor.h"

namespace nvfp4_moe::internal::cpu {

inline constexpr int64_t kBlockRows = 128;  // accumulators: 128 x 32 floats, 16 KB of L1

// Up to kBlockRows rows of activations: their data, filled by `prepare`, and the result.
struct RowBlock {
  int64_t first = 0;  // within the rows that multiply_strips was given
  int64_t count = 0;
  const std::byte* rows[kBlockRows];
  float alpha[kStripPanels][kBlockRows];  // by panel of a strip of gate and up; otherwise only [0]
  float weight[kBlockRows];               // router weights
  alignas(64) float acc[kBlockRows * kStripRows];  // (count, panels * 16)
};

// The tensor scale of a matrix, times 2^shift under fp8.
inline double matrix_scale(float tensor_scale, const Fp8Weights& fp8) {
  return std::ldexp(static_cast<double>(tensor_scale), fp8.shift);
}
// alpha of a row, rounded once; NaN for a nonfinite row, which makes its results NaN.
float row_alpha(const ActivationBuffers& activations, int64_t row, double matrix_scale);

// Minimum number of strips per range, so that several strips share the cost of loading the rows
// into L2.
constexpr int64_t least_strips(int64_t rows) { return rows > 32 ? 4 : 1; }

constexpr int64_t strips_of(int64_t panels) { return (panels + kStripPanels - 1) / kStripPanels; }

// Prefetches a row block's operands into L2, more at a time than a kernel would request.
void prefetch_rows(const RowBlock& block, const Operands& operands);
void multiply(const Kernels& kernels, const Operands& operands, const Strip& strip,
              RowBlock& block);
// The arguments of Kernels::round for acc * alpha[0], rounded once into rows [row, row + count) of
// out (.., channels) from `channel` on; with bias (channels): fl32(acc * alpha[0]) + bias.
RoundRows rows_of_block(const RowBlock& block, int64_t panels, void* out, DType dtype,
                        int64_t channels, int64_t row, int64_t channel,
                        const float* bias = nullptr);

// The source of strips: consecutive panels, and the fp8_shift of each panel of a strip.
struct PanelMatrix {
  const uint8_t* bytes = nullptr;
  int64_t panels = 0;
  std::array<int, kStripPanels> fp8_shift{};
};

// Multiplies strips [first_strip, end_strip) of a matrix with `rows` rows of activations.
// prepare(block) fills rows, alpha and weight for block.first and count; epilogue(block,
// strip_index, panels_of_strip) consumes acc.
template <class Prepare, class Epilogue>
void multiply_strips(const Kernels& kernels, const Operands& operands, const PanelMatrix& matrix,
                     int64_t first_strip, int64_t end_strip, int64_t rows, const Prepare& prepare,
                     const Epilogue& epilogue) {
  const int64_t chunks = chunks_of(operands.k), strip_bytes = kStripPanels * chunks * kChunkBytes;
  RowBlock block;
  for (block.first = 0; block.first < rows; block.first += kBlockRows) {
    block.count = std::min(kBlockRows, rows - block.first);
    prepare(block);
    prefetch_rows(block, operands);
    for (int64_t s = first_strip; s < end_strip; ++s) {
      Strip strip{.bytes = matrix.bytes + s * strip_bytes,
                  .panels = std::min(kStripPanels, matrix.panels - s * kStripPanels),
                  .chunks = chunks,
                  .fp8_shift = matrix.fp8_shift,
                  .next = nullptr};
      // Stays within the matrix, even if its last strip is a single panel.
      strip.next = s + 1 < end_strip && (s + 2) * kStripPanels <= matrix.panels
                       ? strip.bytes + strip_bytes
                       : strip.bytes;
      multiply(kernels, operands, strip, block);
      epilogue(block, s, strip.panels);
    }
  }
}

// Calls body(begin, end) for ranges that cover [0, count), from large ones down to `least`. Large
// ranges read memory sequentially; small ones at the end keep threads from waiting long for each
// other.
template <class Body>
void for_ranges(Executor& executor, int64_t count, int64_t least, const Body& body) {
  if (count <= 0) return;
  const int64_t threads = executor.threads();
  if (threads == 1) return body(int64_t{0}, count);
  std::atomic<int64_t> next{0};
  const auto take = [&](int64_t, int64_t) {
    int64_t begin = next.load(std::memory_order_relaxed);
    while (begin < count) {
      const int64_t end = std::min(count, begin + std::max(least, (count - begin) / (4 * threads)));
      if (next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) {
        body(begin, end);
        begin = next.load(std::memory_order_relaxed);
      }
    }
  };
  executor.parallel_for(std::min(threads, count), 1,
                        std::ref(take));  // by reference: no allocation
}

}  // namespace nvfp4_moe::internal::cpu
