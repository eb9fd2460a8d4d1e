// The 128x4 block-scale layout ("32_4_4": CUTLASS Sm1xxBlockScaledConfig, cuBLASLt VEC16_UE4M3,
// torch to_blocked).
//
// A linear (rows, S) byte matrix, S = K/16, becomes tiles of 128 rows x 4 columns, 512 bytes each,
// K tiles fastest:
//   offset(m, k) = ((m >> 7) * ceil(S/4) + (k >> 2)) * 512
//                  + (m & 31) * 16 + ((m >> 5) & 3) * 4 + (k & 3)
// ceil, not floor, of S/4: the floor form is wrong whenever S % 4 != 0. Padding bytes are zero.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace nvfp4_moe::internal {

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

NVFP4_MOE_HOST_DEVICE constexpr int64_t swizzled_scale_offset(int64_t m, int64_t k,
                                                              int64_t scale_cols) {
  return ((m >> 7) * ((scale_cols + 3) / 4) + (k >> 2)) * 512 + (m & 31) * 16 + ((m >> 5) & 3) * 4 +
         (k & 3);
}
constexpr int64_t swizzled_scale_bytes(int64_t rows, int64_t scale_cols) {
  return round_up(rows, 128) * round_up(scale_cols, 4);
}

// linear: (rows, scale_cols), rows linear_stride bytes apart; swizzled: swizzled_scale_bytes,
// padding zeroed.
void swizzle_scales(const uint8_t* linear, int64_t linear_stride, int64_t rows, int64_t scale_cols,
                    uint8_t* swizzled);
void unswizzle_scales(const uint8_t* swizzled, int64_t rows, int64_t scale_cols, uint8_t* linear,
                      int64_t linear_stride);

// Layout of activation scales of a grouped GEMM: expert e's scales begin at row
// expert_scale_row(offset[e], e), a multiple of 128, so that no prefix sum over padded counts is
// needed (TensorRT-LLM's and FlashInfer's formula).
constexpr int64_t expert_scale_row(int64_t row_offset, int64_t expert) {
  return round_up(row_offset + expert * 127, 128);
}
// Rows that hold every expert's slot, for any distribution of `rows` rows over `experts` experts.
constexpr int64_t expert_scale_rows_bound(int64_t rows, int64_t experts) {
  return round_up(rows + experts * 127, 128);
}

// Swizzles the scales of rows sorted by expert: row_offsets (experts + 1) int64, linear (rows,
// scale_cols), swizzled expert_scale_rows_bound(rows, experts) x round_up(scale_cols, 4) bytes,
// padding zeroed.
void swizzle_expert_scales(const uint8_t* linear, const int64_t* row_offsets, int64_t experts,
                           int64_t scale_cols, uint8_t* swizzled);

}  // namespace nvfp4_moe::internal
