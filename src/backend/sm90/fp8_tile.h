// Packed tiles of weights for E4M3 products. Tiles have the same size and offsets as those of other
// formats (packed_layout.h). Codes and scales are in the order that wgmma m64nNk32 needs from a
// lane after they are rounded (docs/explanation/layouts.md).
//
// With r = lane / 4 and q = lane % 4, a lane's 16 bytes for 64 k are block q of rows r and r + 8 of
// a group, so that all its codes of a row share one scale. In a word of eight codes, the magnitude
// of code i has bits 4i..4i+2, which PRMT takes as a byte index. Its sign is bit 7 of the byte that
// PRMT produces for it if i < 4, and four bits below that if i >= 4.
//
//   word 0: row r, k 16q ..   word 1: row r, k 16q + 8 ..   words 2, 3: row r + 8
//
// A scale is stored as an index: scale * 2^-shift as UE5M3 with exponent bias 13, so that one table
// serves every shift. The smallest such scale of any matrix is 2^-12 and the largest 74 2/3
// (core/fp8.h), so indices are 8..153. Index 0 is a scale of 0; codes under it are kept.
#pragma once

#include <cstdint>

#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::internal::sm90 {

// Converts the eight codes of a word, low nibble first in k, to the order above, and back.
NVFP4_MOE_HOST_DEVICE constexpr int fp8_sign_bit(int i) {
  return i < 4 ? 8 * i + 7 : 8 * (i - 4) + 3;
}
NVFP4_MOE_HOST_DEVICE constexpr uint32_t pack_fp8_word(uint32_t codes) {
  uint32_t word = codes & 0x77777777u;
  for (int i = 0; i < 8; ++i) word |= (codes >> (4 * i + 3) & 1) << fp8_sign_bit(i);
  return word;
}
NVFP4_MOE_HOST_DEVICE constexpr uint32_t unpack_fp8_word(uint32_t word) {
  uint32_t codes = word & 0x77777777u;
  for (int i = 0; i < 8; ++i) codes |= (word >> fp8_sign_bit(i) & 1) << (4 * i + 3);
  return codes;
}

inline constexpr int kFp8ScaleIndices = 160;
// The index of an E4M3 byte 0x00..0x7E, and back.
NVFP4_MOE_HOST_DEVICE constexpr uint32_t fp8_scale_index(uint32_t e4m3, int32_t shift) {
  return e4m3 == 0 ? 0 : cuda::scale_to_ue5m3(e4m3) + static_cast<uint32_t>(24 - 8 * shift);
}
NVFP4_MOE_HOST_DEVICE constexpr uint32_t fp8_scale_byte(uint32_t index, int32_t shift) {
  return index == 0 ? 0 : cuda::scale_from_ue5m3(index - static_cast<uint32_t>(24 - 8 * shift));
}
// The fp32 bits of scale * 2^-shift, for a nonzero index.
NVFP4_MOE_HOST_DEVICE constexpr uint32_t fp8_scale_bits(uint32_t index) {
  return (index << 20) + (114u << 23);
}

// Offset within its tile of a lane's two scale indices: for row r, for row r + 8.
NVFP4_MOE_HOST_DEVICE constexpr int fp8_scales_offset(int group, int half, int lane) {
  return static_cast<int>(cuda::kTileCodeBytes) + ((group * cuda::kHalves + half) * 32 + lane) * 2;
}

}  // namespace nvfp4_moe::internal::sm90
