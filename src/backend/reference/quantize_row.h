// One row of activations to its format: what both quantizations of a layer and the linear do with
// each row.
#pragma once

#include <atomic>
#include <cstdint>

#include "backend/layer_steps.h"
#include "core/config.h"
#include "core/dtype.h"

namespace nvfp4_moe::internal::reference {

struct RowCounts {
  uint64_t blocks = 0;
  uint64_t saturated = 0;  // the scale lies above 448
  uint64_t zeroed = 0;     // not all zero, but the scale rounds to 0
};

// The scale policy of a quantization: dynamic_token, a power of two for every row (static, fixed),
// or compat.
struct ScalePolicy {
  enum Kind { kDynamicToken, kPowerOfTwo, kCompat } kind = kDynamicToken;
  float scale = 0;
};

// A row's largest magnitude, which every format needs first.
struct RowRange {
  double amax = 0;     // of finite elements and infinities; NaN is left out
  bool finite = true;  // no element is NaN or Inf
};
RowRange range_of(const void* x, DType dtype, int64_t first, int64_t cols);

// Exponent of the smallest power of two s with amax <= largest s; 0 for a row of zeros, at least
// -126.
int dynamic_exponent(double amax, double largest);

// x: cols elements of dtype, beginning at element `first`. Writes row `row` of codes, block_scales,
// row_scale and nonfinite. A nonfinite row gets 1, zero codes and scales, and a NaN row scale; it
// counts no blocks.
void quantize_row(const void* x, DType dtype, int64_t first, int64_t cols,
                  const ScalePolicy& policy, const ActivationBuffers& out, int64_t row,
                  RowCounts& counts);

// int8_block: writes row `row` of int8_codes, int8_scales and nonfinite. A nonfinite row gets 1,
// zero codes and NaN scales; it counts no blocks. No scale saturates; counts.zeroed are blocks
// whose codes alone are all 0.
void quantize_row_int8(const void* x, DType dtype, int64_t first, int64_t cols,
                       const ActivationBuffers& out, int64_t row, RowCounts& counts);

// fp8: writes row `row` of fp8, row_scale and nonfinite. A nonfinite row gets 1, zero codes and a
// NaN scale; it counts no blocks. counts.saturated are blocks of 16 with an element above 448 row
// scales, counts.zeroed those that are not all zero but whose codes are. The policy is not compat.
void quantize_row_fp8(const void* x, DType dtype, int64_t first, int64_t cols,
                      const ScalePolicy& policy, const ActivationBuffers& out, int64_t row,
                      RowCounts& counts);

// Rounds a row to bf16, and sets nonfinite to 1 if it holds NaN or Inf, else to 0.
void round_row(const void* x, DType dtype, int64_t first, int64_t cols,
               const ActivationBuffers& out, int64_t row);

// The row in the format of the layer; policy and counts belong to the formats that quantize.
inline void convert_row(ActivationFormat format, const void* x, DType dtype, int64_t first,
                        int64_t cols, const ScalePolicy& policy, const ActivationBuffers& out,
                        int64_t row, RowCounts& counts) {
  switch (format) {
    case ActivationFormat::kNvfp4:
      return quantize_row(x, dtype, first, cols, policy, out, row, counts);
    case ActivationFormat::kBf16: return round_row(x, dtype, first, cols, out, row);
    case ActivationFormat::kInt8Block:
      return quantize_row_int8(x, dtype, first, cols, out, row, counts);
    case ActivationFormat::kFp8:
      return quantize_row_fp8(x, dtype, first, cols, policy, out, row, counts);
  }
}

// Threads add their counts to the run's status; the sum does not depend on their order.
inline void add_count(uint64_t& total, uint64_t count) {
  if (count != 0) std::atomic_ref<uint64_t>(total).fetch_add(count, std::memory_order_relaxed);
}

}  // namespace nvfp4_moe::internal::reference
