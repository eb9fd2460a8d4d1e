// Loops of the 128x4 block-scale layout. The formulas are in the header.
#include "core/scale_layout.h"

#include <cstring>

namespace nvfp4_moe::internal {
namespace {

// Writes rows [0, rows) of `linear` to rows [first, first + rows) of a swizzled matrix whose
// padding is already zero.
void scatter_rows(const uint8_t* linear, int64_t linear_stride, int64_t rows, int64_t scale_cols,
                  int64_t first, uint8_t* swizzled) {
  for (int64_t m = 0; m < rows; ++m) {
    const uint8_t* row = linear + m * linear_stride;
    uint8_t* out = swizzled + swizzled_scale_offset(first + m, 0, scale_cols);
    int64_t k = 0;
    for (; k + 4 <= scale_cols; k += 4, out += 512) std::memcpy(out, row + k, 4);
    if (k < scale_cols) std::memcpy(out, row + k, static_cast<size_t>(scale_cols - k));
  }
}

}  // namespace

void swizzle_scales(const uint8_t* linear, int64_t linear_stride, int64_t rows, int64_t scale_cols,
                    uint8_t* swizzled) {
  if (rows == 0 || scale_cols == 0) return;
  std::memset(swizzled, 0, static_cast<size_t>(swizzled_scale_bytes(rows, scale_cols)));
  scatter_rows(linear, linear_stride, rows, scale_cols, 0, swizzled);
}

void unswizzle_scales(const uint8_t* swizzled, int64_t rows, int64_t scale_cols, uint8_t* linear,
                      int64_t linear_stride) {
  for (int64_t m = 0; m < rows; ++m) {
    uint8_t* row = linear + m * linear_stride;
    for (int64_t k = 0; k < scale_cols; ++k)
      row[k] = swizzled[swizzled_scale_offset(m, k, scale_cols)];
  }
}

void swizzle_expert_scales(const uint8_t* linear, const int64_t* row_offsets, int64_t experts,
                           int64_t scale_cols, uint8_t* swizzled) {
  const int64_t bound = expert_scale_rows_bound(row_offsets[experts], experts);
  if (bound == 0 || scale_cols == 0) return;
  std::memset(swizzled, 0, static_cast<size_t>(swizzled_scale_bytes(bound, scale_cols)));
  for (int64_t e = 0; e < experts; ++e)
    scatter_rows(linear + row_offsets[e] * scale_cols, scale_cols,
                 row_offsets[e + 1] - row_offsets[e], scale_cols,
                 expert_scale_row(row_offsets[e], e), swizzled);
}

}  // namespace nvfp4_moe::internal
