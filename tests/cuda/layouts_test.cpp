// Layouts on a host: every code and scale is restored, and the bits have the meaning that the
// kernels assume.
#include <gtest/gtest.h>

#include <bit>
#include <set>
#include <vector>

#include "backend/cuda/fp4_operand.h"
#include "backend/cuda/packed_tile.h"
#include "backend/sm100/row_tile.h"
#include "backend/sm100/weight_tile.h"
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

TEST(Fp4Operand, OffsetsCoverTheRow) {
  for (int64_t k : {16, 48, 64, 144, 256, 272, 720, 1040, 7168}) {
    SCOPED_TRACE(k);
    const int64_t row_bytes = fp4_row_bytes(k), vec8s = fp4_row_vec8s(k);
    EXPECT_EQ(row_bytes % 16, 0);
    EXPECT_GE(vec8s * 8, k);
    EXPECT_LT(vec8s * 8, k + kFp4KBlock);
    std::vector<int> written(static_cast<size_t>(row_bytes));
    for (int64_t i = 0; i < vec8s; ++i) {
      EXPECT_EQ(fp4_codes_offset(i) % 4, 0);
      for (int64_t byte = 0; byte < 4; ++byte)
        ++written.at(static_cast<size_t>(fp4_codes_offset(i) + byte));
      EXPECT_EQ(fp4_scale_offset(i), fp4_scale_offset(i / 2 * 2));
      if (i % 2 == 0) ++written.at(static_cast<size_t>(fp4_scale_offset(i)));
    }
    for (int times : written) ASSERT_EQ(times, 1);
  }
}

// Eight rows of 16 bytes at the same k, which the tensor cores read together, are in 128 bytes of
// different banks.
TEST(Tcgen05Tile, EightRowsHaveNoBankConflict) {
  for (int row = 0; row < kTileRows; row += 8)
    for (int c = 0; c < sm100::kRowVecs; ++c) {
      std::set<int> weights, rows;
      for (int r = row; r < row + 8; ++r) {
        weights.insert(sm100::weight_codes_offset(r, c % 4) % 128);
        rows.insert(sm100::row_codes_offset(r, c) % 128);
      }
      EXPECT_EQ(weights.size(), 8u);
      EXPECT_EQ(rows.size(), 8u);
    }
}

}  // namespace
}  // namespace nvfp4_moe::internal::cuda
