// MXFP4 to NVFP4: E2M1 codes with one E8M0 scale 2^k per 32 along K become codes with one E4M3
// scale per 16.
//
//   tensor_scale = 2^m, m = max(k_max - 8, -126)
//   block scale = 2^(k_j - m), given to both 16-blocks;  codes unchanged.
//
// E4M3 holds 2^8 .. 2^-9, so this is exact while k_max - k_j <= 17. A block below that gets the
// smallest scale, 2^-9, and its codes are rounded once, to the nearest E2M1 value of code * 2^(k_j
// - m + 9), ties to even. A 16-block whose codes all round to 0 gets scale 0. Such blocks are
// counted.
//
// If the spread exceeds 17, k_max counts only blocks with a nonzero code, so a stray scale over
// zeros costs nothing. A block of zeros is always exact. k_max is that of the given matrix: a slice
// needs no scale outside it, and decodes to the same values.
#pragma once

#include <cstdint>

#include "core/status.h"

namespace nvfp4_moe::internal {

struct Mxfp4Cast {
  float tensor_scale = 1.0f;
  uint64_t rounded_blocks = 0;  // 16-blocks whose values changed
};

// Casts codes (rows, cols/2) and scales (rows, ...), which are E8M0 bytes. 16-block b of a row has
// scale byte (b + phase) / 2, and phase is 1 if a slice begins with the second half of a 32-block.
// out_codes (rows, cols/2) and out_scales (rows, cols/16) are contiguous. cols is a multiple of 16.
// kBadInput if a scale is NaN (0xFF).
Result<Mxfp4Cast> cast_mxfp4(const uint8_t* codes, int64_t codes_stride, const uint8_t* scales,
                             int64_t scales_stride, int phase, int64_t rows, int64_t cols,
                             uint8_t* out_codes, uint8_t* out_scales);

}  // namespace nvfp4_moe::internal
