// The packed tiles of weights for tcgen05: 128 rows x 128 k. Tiles have the same size and offsets
// as those of the other CUDA backends (packed_layout.h). Codes and scales are in the order in which
// the tensor cores read them from shared memory (docs/explanation/layouts.md), so one bulk copy
// loads any number of consecutive tiles and nothing is rearranged.
//
//   codes    row r at 64 r, 64 bytes in the order of the source, in the 64-byte swizzle: 16 bytes c
//            are at c ^ (r / 2 % 4)
//   scales   for each 64 k 512 bytes, the 128x4 layout: the word of row r, four unchanged E4M3
//            bytes, at 16 (r % 32) + 4 (r / 32)
//
// Eight rows of 16 bytes at the same k cover all banks once. A code under a scale of 0 contributes
// nothing and is kept.
#pragma once

#include <cstdint>

#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::internal::sm100 {

inline constexpr int kStepK = 64;                         // k of one product
inline constexpr int kTileSteps = cuda::kTileK / kStepK;  // per tile
inline constexpr int kWeightRowBytes = cuda::kTileK / 2;  // codes per row of a tile
inline constexpr int kStepBytes = kStepK / 2;             // of a row of codes, for any swizzle
inline constexpr int kAtomRows = 128;  // rows of scales that one copy moves to tensor memory
// the scales of that many rows over kStepK
inline constexpr int kAtomBytes = kAtomRows * kStepK / 16;

// Offset within its tile of 16 bytes of codes: k 32 c to 32 c + 31 of a row.
NVFP4_MOE_HOST_DEVICE constexpr int weight_codes_offset(int row, int c) {
  return row * kWeightRowBytes + (c ^ (row / 2 & 3)) * 16;
}
// Offset within an atom of a row's word of scales.
NVFP4_MOE_HOST_DEVICE constexpr int atom_offset(int row) { return row % 32 * 16 + row / 32 * 4; }
// Offset within its tile of a row's word of scales.
NVFP4_MOE_HOST_DEVICE constexpr int weight_scales_offset(int row, int step) {
  return static_cast<int>(cuda::kTileCodeBytes) + step * kAtomBytes + atom_offset(row);
}
static_assert(kTileSteps * kAtomBytes == cuda::kTileScaleBytes);

}  // namespace nvfp4_moe::internal::sm100
