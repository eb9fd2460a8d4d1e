// A tile's rows of activations in shared memory, a k-block of 256 k, as tcgen05 reads them:
//
//   codes    row r at 128 r, in the order of the operand (fp4_operand.h), in the 128-byte swizzle:
//            16 bytes c are at c ^ (r % 8)
//   scales   for each 64 k one or two atoms of 128 rows (weight_tile.h): rows 0..127, then rows
//            128..255
#pragma once

#include <cstdint>

#include "backend/cuda/fp4_operand.h"
#include "backend/sm100/weight_tile.h"

namespace nvfp4_moe::internal::sm100 {

inline constexpr int kRowBytes = cuda::kFp4KBlockScales;       // codes per row
inline constexpr int kRowVecs = kRowBytes / 16;                // of 16 bytes
inline constexpr int kBlockSteps = cuda::kFp4KBlock / kStepK;  // products per k-block
// words of scales per row, one per step
inline constexpr int kRowWords = cuda::kFp4KBlock / 16 / 4;
constexpr int atoms_of(int rows) { return rows > kAtomRows ? 2 : 1; }

NVFP4_MOE_HOST_DEVICE constexpr int row_codes_offset(int row, int c) {
  return row * kRowBytes + (c ^ (row & 7)) * 16;
}
// Offset of a row's word of scales for a step; atoms: per step.
NVFP4_MOE_HOST_DEVICE constexpr int row_scales_offset(int row, int step, int atoms) {
  return (step * atoms + row / kAtomRows) * kAtomBytes + atom_offset(row % kAtomRows);
}

}  // namespace nvfp4_moe::internal::sm100
