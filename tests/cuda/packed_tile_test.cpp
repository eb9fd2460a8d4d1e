// The packed layout on a host: every code and scale is restored, and the bits have the meaning that
// the kernels assume.
#include "backend/cuda/packed_tile.h"

#include <gtest/gtest.h>

#include <bit>
#include <set>

#include "core/float_formats.h"

namespace nvfp4_moe::internal::cuda {
namespace {

double bf16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }

TEST(PackedTile, EveryHalfComesBack) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    uint32_t codes[4];
    for (int i = 0; i < 4; ++i) codes[i] = unpack_half(half, i);
    ASSERT_EQ(pack_half(codes[0], codes[1], codes[2], codes[3]), half);
  }
}

// A code is e2m1 2^-126 in bf16, for every value of the word's other half: the halves are
// independent.
TEST(PackedTile, PairsAreTheCodes) {
  for (uint32_t half = 0; half < 0x10000; ++half)
    for (uint32_t other : {0u, 0xFFFFu, half, half * 40503u & 0xFFFFu}) {
      const CodePairs pairs = code_pairs(half | other << 16);
      for (int i = 0; i < 4; ++i) {
        ASSERT_EQ(bf16(pairs.a[i] & 0xFFFF) * 0x1p126,
                  e2m1_to_float(static_cast<uint8_t>(unpack_half(half, i))));
        ASSERT_EQ(bf16(pairs.a[i] >> 16) * 0x1p126,
                  e2m1_to_float(static_cast<uint8_t>(unpack_half(other, i))));
      }
    }
}

TEST(PackedTile, ScaleWordsGiveBothSteps) {
  for (uint32_t even = 0; even < 256; ++even)
    for (uint32_t odd = 0; odd < 256; ++odd) {
      const uint32_t even_pair = even | (255 - odd) << 16, odd_pair = odd | (even ^ 0x5A) << 16;
      const uint32_t word = pack_scales(even_pair, odd_pair);
      ASSERT_EQ(scales_of_step(word, false) & kScalesMask, even_pair << 4);
      ASSERT_EQ(scales_of_step(word, true) & kScalesMask, odd_pair << 4);
    }
}

TEST(PackedTile, ScalesAreTheSameNumbersAndComeBack) {
  std::set<uint32_t> seen;
  for (uint32_t byte = 0; byte < 0x7F; ++byte) {
    const uint32_t packed = scale_to_ue5m3(byte);
    EXPECT_LT(packed, 256u);
    EXPECT_TRUE(seen.insert(packed).second) << byte;
    EXPECT_EQ(scale_from_ue5m3(packed), byte);
    if (byte == 0) continue;
    EXPECT_EQ(bf16((packed << 4) + 0x3A80), e4m3_to_float(static_cast<uint8_t>(byte))) << byte;
  }
}

// Lanes and scale words fill a tile without gap or overlap.
TEST(PackedTile, OffsetsCoverTheTile) {
  std::set<int> starts;
  for (int group = 0; group < kGroups; ++group)
    for (int half = 0; half < kHalves; ++half) {
      for (int lane = 0; lane < 32; ++lane) {
        EXPECT_EQ(lane_offset(group, half, lane) % 16, 0);
        EXPECT_TRUE(starts.insert(lane_offset(group, half, lane)).second);
      }
      for (int r = 0; r < 8; ++r) EXPECT_TRUE(starts.insert(scale_offset(group, half, r)).second);
    }
  EXPECT_EQ(static_cast<int64_t>(starts.size()), kTileCodeBytes / 16 + kTileScaleBytes / 8);
  EXPECT_EQ(*starts.rbegin() + 8, kTileBytes);
}

TEST(PackedTile, JoinedRowsPairGateAndUp) {
  for (int64_t m = 0; m < 4 * kTileRows; ++m) {
    const JoinedRow row = joined_row(m);
    if (m % 16 < 8) {
      EXPECT_EQ(row.projection, 0);
      EXPECT_EQ(joined_row(m + 8).projection, 1);
      EXPECT_EQ(joined_row(m + 8).row, row.row);
      EXPECT_EQ(row.row, m / 16 * 8 + m % 16);
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::cuda
