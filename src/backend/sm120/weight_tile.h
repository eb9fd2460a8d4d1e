// The packed tiles of weights for block-scaled FP4 products: 128 rows x 128 k. Tiles have the same
// size and offsets as those of the other CUDA backends (packed_layout.h). Codes and scales are in
// the order that mma.m16n8k64 needs from a lane (docs/explanation/layouts.md).
//
// A group of 16 rows over half a tile's k (64) is one A fragment. With r = lane / 4 and q = lane %
// 4, a lane's 16 bytes are the instruction's four registers, each with eight consecutive k of one
// row in the order of the source:
//
//   word 0: row r, k 8q ..    word 1: row r + 8, k 8q ..    word 2: row r, k 32 + 8q ..    word 3:
//                             row r + 8, k 32 + 8q ..
//
// The scales of a row over 64 k are one word of unchanged E4M3 bytes; the word of row r + 8 follows
// that of row r. Scale selectors 0 take row r from lane 4r and row r + 8 from lane 4r + 1. A code
// under a scale of 0 contributes nothing and is kept.
#pragma once

#include <cstdint>

#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::internal::sm120 {

inline constexpr int kStepK = 64;        // k of one mma
inline constexpr int kWordsPerLane = 4;  // of 16 bytes

// The source position of the eight codes of a lane's word: row of the group, k of the half.
struct CodeWord {
  int row, k;
};
NVFP4_MOE_HOST_DEVICE constexpr CodeWord code_word(int lane, int word) {
  return {lane / 4 + word % 2 * 8, lane % 4 * 8 + word / 2 * 32};
}
// Offset within its tile of the word of scales of a group's row.
NVFP4_MOE_HOST_DEVICE constexpr int scale_word_offset(int group, int half, int row) {
  return cuda::scale_offset(group, half, row % 8) + row / 8 * 4;
}
// The row whose scales a lane passes to the instruction. Values from lanes 4r + 2 and 4r + 3 are
// ignored.
NVFP4_MOE_HOST_DEVICE constexpr int scale_row(int lane) { return lane / 4 + lane % 2 * 8; }

}  // namespace nvfp4_moe::internal::sm120
