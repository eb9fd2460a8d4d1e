// Weights of activation_format fp8 against the contract's oracle, which shares no table with core.
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

TEST(Fp8Weights, ShiftsAreTheLeastThatFit) {
  EXPECT_EQ(fp8_weight_shift(0), 0);
  for (int byte = 1; byte < 127; ++byte) {
    const double top = 6 * oracle_e4m3(byte);
    const int shift = fp8_weight_shift(static_cast<uint8_t>(byte));
    EXPECT_LE(std::ldexp(top, -shift), 448) << byte;
    EXPECT_GT(std::ldexp(top, 1 - shift), 448) << byte;
    EXPECT_GE(shift, kFp8LeastShift);
    EXPECT_LE(shift, kFp8MostShift);
  }
  EXPECT_EQ(fp8_weight_shift(1), kFp8LeastShift);
  EXPECT_EQ(fp8_weight_shift(126), kFp8MostShift);
}

// Every code under every block scale that a matrix of each shift may have is the nearest of all
// E4M3 numbers.
TEST(Fp8Weights, AreRoundedOnce) {
  for (int largest = 1; largest < 127; ++largest) {
    const int shift = fp8_weight_shift(static_cast<uint8_t>(largest));
    for (int byte = 0; byte <= largest; ++byte)
      for (int code = 0; code < 16; ++code) {
        const double exact = std::ldexp(oracle_e2m1(code) * oracle_e4m3(byte), -shift);
        const uint8_t rounded =
            fp8_weight(static_cast<uint8_t>(code), static_cast<uint8_t>(byte), shift);
        ASSERT_EQ(rounded >> 7, std::signbit(exact)) << code << " " << byte << " " << shift;
        const int magnitude = rounded & 127;
        const auto error = [&](int other) {
          return std::fabs(oracle_e4m3(other) - std::fabs(exact));
        };
        for (const int other : {std::max(magnitude - 1, 0), std::min(magnitude + 1, 126)})
          ASSERT_TRUE(other == magnitude || error(magnitude) < error(other) ||
                      (error(magnitude) == error(other) && magnitude % 2 == 0))
              << code << " " << byte << " " << shift;
      }
  }
}

TEST(Fp8Weights, AreMeasuredOverRowsWithAStride) {
  std::mt19937 random(7);
  for (const int64_t cols : {16, 80, 256, 496}) {  // a count holds 15 blocks
    for (const int least : {0, 1, 40, 100}) {
      const int64_t rows = 37;
      std::vector<uint8_t> codes(static_cast<size_t>(rows * cols / 2)),
          scales(static_cast<size_t>(rows * cols / 16));
      for (uint8_t& byte : codes) byte = static_cast<uint8_t>(random());
      for (uint8_t& byte : scales)
        byte = static_cast<uint8_t>(
            least == 0 ? 0 : least + static_cast<int>(random() % static_cast<uint32_t>(127 - least)));
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
}

TEST(Fp8Rows, HaveTheSmallestPowerOfTwoThatFits) {
  EXPECT_EQ(fp8_token_scale(0.0f), 1.0f);
  EXPECT_EQ(fp8_token_scale(0x1p-149f), 0x1p-126f);
  EXPECT_TRUE(std::isnan(fp8_token_scale(HUGE_VALF)));
  EXPECT_TRUE(std::isnan(fp8_token_scale(NAN)));
  for (int k = -126; k < 119; ++k) {
    const float edge = std::ldexp(448.0f, k);
    EXPECT_EQ(fp8_token_scale(edge), std::ldexp(1.0f, k));
    EXPECT_EQ(fp8_token_scale(std::nextafter(edge, HUGE_VALF)), std::ldexp(1.0f, k + 1));
    EXPECT_EQ(fp8_token_scale(std::nextafter(edge, 0.0f)), std::ldexp(1.0f, k));
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
