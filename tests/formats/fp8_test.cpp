// The measurement of fp8 weights against the contract's oracle, which shares no table with core,
// and the scales of rows. LinearOfBackend.EveryFp8Weight has every rounding under every shift.
#include "core/fp8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "core/float_formats.h"
#include "core/quantize.h"
#include "support/spec_oracle.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(Fp8Weights, AreMeasuredOverRowsWithAStride) {
  std::mt19937 random(7);
  for (const int64_t cols : {16, 80, 256, 496}) {
    for (const int least : {0, 1, 40, 100}) {
      const int64_t rows = 37;
      std::vector<uint8_t> codes(static_cast<size_t>(rows * cols / 2)),
          scales(static_cast<size_t>(rows * cols / 16));
      for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random());
      for (uint8_t& byte : scales)
        byte = static_cast<uint8_t>(
            least == 0 ? 0
                       : least + static_cast<int>(random() % static_cast<uint32_t>(127 - least)));
      const Nvfp4View whole = Nvfp4View::contiguous(codes.data(), scales.data(), 1.0f, rows, cols);
      const OracleFp8Weights expected = oracle_fp8_weights(whole);
      EXPECT_EQ(measure_fp8_weights(whole), (Fp8Weights{expected.shift, expected.inexact}));
      if (cols == 16) continue;
      // All but the last block of each row, against a copy without the stride.
      Nvfp4View part = whole;
      part.cols -= 16;
      std::vector<uint8_t> part_codes, part_scales;
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t *of_row = part.row_codes(r), *scales_of_row = part.row_scales(r);
        part_codes.insert(part_codes.end(), of_row, of_row + part.cols / 2);
        part_scales.insert(part_scales.end(), scales_of_row, scales_of_row + part.cols / 16);
      }
      const auto copy = oracle_fp8_weights(
          Nvfp4View::contiguous(part_codes.data(), part_scales.data(), 1.0f, rows, part.cols));
      EXPECT_EQ(measure_fp8_weights(part), (Fp8Weights{copy.shift, copy.inexact}));
    }
  }
  // Every code is rounded: 1.5 times a scale of significand 1.125. A count holds 15 blocks.
  for (const int64_t cols : {240, 256, 496}) {
    const std::vector<uint8_t> codes(static_cast<size_t>(3 * cols / 2), 0x55),
        scales(static_cast<size_t>(3 * cols / 16), 0x79);
    const auto all = Nvfp4View::contiguous(codes.data(), scales.data(), 1.0f, 3, cols);
    EXPECT_EQ(measure_fp8_weights(all).inexact, static_cast<uint64_t>(3 * cols));
  }
}

TEST(Fp8Rows, HaveTheSmallestPowerOfTwoThatFits) {
  EXPECT_EQ(fp8_token_scale(0.0f), 1.0f);
  EXPECT_EQ(fp8_token_scale(0x1p-149f), 0x1p-126f);
  EXPECT_TRUE(std::isnan(fp8_token_scale(HUGE_VALF)));
  for (int k = -126; k < 119; ++k) {
    const float edge = std::ldexp(448.0f, k);
    EXPECT_EQ(fp8_token_scale(edge), std::ldexp(1.0f, k));
    EXPECT_EQ(fp8_token_scale(std::nextafter(edge, HUGE_VALF)), std::ldexp(1.0f, k + 1));
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
