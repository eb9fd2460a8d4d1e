// The packed layout of the CUDA backends: the positions of a weight's four bits and of its block's
// scale byte (docs/explanation/layouts.md).
//
// A matrix becomes tiles of 128 rows x 128 k, consecutive along K. A tile is 8 KiB of codes and 1
// KiB of scales. Codes are in the order of the A fragment of mma.m16n8k16 (a warp's quarter of
// wgmma's): lane l holds rows r = l/4 and r + 8 of 16, k = 2c, 2c+1, 2c+8, 2c+9 with c = l%4. One
// lane's 16 bytes are four k16 steps, one 32-bit word each.
//
// In each 16-bit half of a word (low half: even k, high half: odd k) the four codes (s e f m) of
// a0..a3 are arranged so that a shift and a mask give bf16 bits 15, 8, 7, 6 = s e f m, which is
// exactly e2m1 2^-126, including the subnormal code. One multiplication gathers a3's bits:
//
//   bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
//         a0 a3 a3 a1 a3 a3 a2 a0 a0 a0 a1 a1 a1 a2 a2 a2
//         s  f  m  s  s  e  s  e  f  m  e  f  m  e  f  m
//
// A scale byte is UE5M3 with exponent bias 10. It has E4M3's exact value, with its subnormals as
// normal numbers, so (byte << 4) + 0x3A80 are the bits of that value in bf16. Zero has no such
// byte: a block with scale 0 has byte 0 and codes 0. A word of scales has those of rows r and r + 8
// of an even k16 step at bits 4..11 and 20..27, the bit positions of bf16. Rotating the word moves
// those of the following odd step to the same bits.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace nvfp4_moe::internal::cuda {

inline constexpr int kTileRows = 128;
inline constexpr int kTileK = 128;
inline constexpr int kGroupRows = 16;  // rows of one fragment
inline constexpr int kGroups = kTileRows / kGroupRows;
inline constexpr int kStepsPerLane = 4;                   // k16 steps of one lane's 16 bytes
inline constexpr int kHalves = kTileK / 64;               // halves of a tile along K, 64 k each
inline constexpr int64_t kTileCodeBytes = 128 * 128 / 2;  // (group, half, lane) x 16 bytes
inline constexpr int64_t kTileScaleBytes = 128 * 8;       // (group, half, r) x 8 bytes
inline constexpr int64_t kTileBytes = kTileCodeBytes + kTileScaleBytes;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Offset within its tile of a lane's 16 bytes of codes.
NVFP4_MOE_HOST_DEVICE constexpr int lane_offset(int group, int half, int lane) {
  return ((group * kHalves + half) * 32 + lane) * 16;
}
// Offset within its tile of the two words of scales of rows r and r + 8 of a group over 64 k. Word
// w has steps 2w, 2w + 1.
NVFP4_MOE_HOST_DEVICE constexpr int scale_offset(int group, int half, int r) {
  return static_cast<int>(kTileCodeBytes) + ((group * kHalves + half) * 8 + r) * 8;
}

// The 16-bit half that contains codes a0..a3, and the code at position i of it.
NVFP4_MOE_HOST_DEVICE constexpr uint32_t pack_half(uint32_t a0, uint32_t a1, uint32_t a2,
                                                   uint32_t a3) {
  const auto spread = [](uint32_t code, int shift) {
    return ((code & 8) << 12 | (code & 7) << 6) >> shift;
  };
  return spread(a0, 0) | spread(a1, 3) | spread(a2, 6) | (a3 & 12) << 8 | (a3 & 3) << 13;
}
NVFP4_MOE_HOST_DEVICE constexpr uint32_t unpack_half(uint32_t half, int i) {
  if (i == 3) return (half >> 8 & 12) | (half >> 13 & 3);
  const uint32_t moved = half << 3 * i;
  return (moved >> 12 & 8) | (moved >> 6 & 7);
}

// The codes a0..a3 of both halves of a word as pairs of bf16: e2m1 2^-126.
struct CodePairs {
  uint32_t a[4];
};
NVFP4_MOE_HOST_DEVICE constexpr CodePairs code_pairs(uint32_t word) {
  constexpr uint32_t kMask = 0x81C081C0u;  // s e f m at bits 15, 8, 7, 6 of both halves
  // Bits 10, 11, 13, 14 move down to 0, 1, 3, 4, and the multiplication moves them up by 14, 8 and
  // 3: s to 15, e to 8, f and m to 7 and 6. No two of the twelve products overlap, so nothing
  // carries.
  constexpr uint32_t kTogether = 1u << 14 | 1u << 8 | 1u << 3;
  return {{word & kMask, word << 3 & kMask, word << 6 & kMask,
           (word >> 10 & 0x001B001Bu) * kTogether & kMask}};
}

// E4M3 without sign (0x00..0x7E) <-> UE5M3 with bias 10; 0 <-> 0.
NVFP4_MOE_HOST_DEVICE constexpr uint32_t scale_to_ue5m3(uint32_t e4m3) {
  if (e4m3 >= 8) return e4m3 + 24;
  if (e4m3 >= 4) return 24 + (e4m3 - 4) * 2;
  if (e4m3 >= 2) return 16 + (e4m3 - 2) * 4;
  return e4m3 * 8;
}
NVFP4_MOE_HOST_DEVICE constexpr uint32_t scale_from_ue5m3(uint32_t byte) {
  if (byte >= 32) return byte - 24;
  if (byte >= 24) return 4 + (byte - 24) / 2;
  if (byte >= 16) return 2 + (byte - 16) / 4;
  return byte / 8;
}

// A word of scales from pairs of UE5M3 bytes (row r in bits 0..7, row r + 8 in bits 16..23) of an
// even and an odd step.
NVFP4_MOE_HOST_DEVICE constexpr uint32_t pack_scales(uint32_t even, uint32_t odd) {
  return even << 4 | odd >> 4 | odd << 28;
}
// The pair of a step at bits 4..11 and 20..27; `word`'s other bits are not cleared.
NVFP4_MOE_HOST_DEVICE constexpr uint32_t scales_of_step(uint32_t word, bool odd) {
  return odd ? word << 8 | word >> 24 : word;
}
inline constexpr uint32_t kScalesMask = 0x0FF00FF0u;

// Row of gate (projection 0) or up (1) at row m of the joined matrix: granules of 8, so that one
// lane holds gate and up of the same channel in rows r and r + 8.
struct JoinedRow {
  int projection;
  int64_t row;
};
NVFP4_MOE_HOST_DEVICE constexpr JoinedRow joined_row(int64_t m) {
  return {static_cast<int>(m / 8 % 2), m / 16 * 8 + m % 8};
}
// Only its row, in three instructions.
NVFP4_MOE_HOST_DEVICE constexpr uint32_t joined_channel(uint32_t m) { return m / 16 * 8 + m % 8; }

}  // namespace nvfp4_moe::internal::cuda
