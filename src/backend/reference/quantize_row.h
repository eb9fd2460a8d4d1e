// Converts one row of activations to its format, for both quantizations of a layer and for the
// linear.
#pragma once

#include <atomic>
#include <cstdint>

#include "backend/layer_steps.h"
#include "core/config.h"
#include "core/dtype.h"

namespace nvfp4_moe::internal::reference {

struct RowCounts {
  uint64_t blocks = 0;
  uint64_t saturated = 0;  // blocks whose scale is above 448
  uint64_t zeroed = 0;     // blocks that are not all zero, but whose scale rounds to 0
};

// The scale policy of a quantization: dynamic_token, a power of two for every row (static, fixed),
// or vllm_order.
struct ScalePolicy {
  enum Kind { kDynamicToken, kPowerOfTwo, kVllmOrder } kind = kDynamicToken;
  float scale = 0;
};

// A row's largest magnitude, which every format needs first.
struct RowRange {
  double amax = 0;     // of finite elements and infinities, ignoring NaN
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
// zero codes and NaN scales; it counts no blocks. No scale saturates; counts.zeroed counts blocks
// that are not all zero but whose codes are.
void quantize_row_int8(const void* x, DType dtype, int64_t first, int64_t cols,
                       const ActivationBuffers& out, int64_t row, RowCounts& counts);

// fp8: writes row `row` of fp8, row_scale and nonfinite. A nonfinite row gets 1, zero codes and a
// NaN scale; it counts no blocks. counts.saturated counts blocks of 16 with an element above 448
// row scales, counts.zeroed those that are not all zero but whose codes are. The policy must not be
// vllm_order.
void quantize_row_fp8(const void* x, DType dtype, int64_t first, int64_t cols,
                      const ScalePolicy& policy, const ActivationBuffers& out, int64_t row,
                      RowCounts& counts);

// Rounds a row to bf16, and sets nonfinite to 1 if it contains NaN or Inf, otherwise to 0.
void round_row(const void* x, DType dtype, int64_t first, int64_t cols,
               const ActivationBuffers& out, int64_t row);

// Converts a row to the layer's format; only formats that quantize use policy and counts.
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

// Adds a thread's count to the run's status; the total does not depend on the order.
inline void add_count(uint64_t& total, uint64_t count) {
  if (count != 0) std::atomic_ref<uint64_t>(total).fetch_add(count, std::memory_order_relaxed);
}

}  // namespace nvfp4_moe::internal::reference
