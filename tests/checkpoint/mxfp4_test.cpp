// The MXFP4 cast against its definition in double: exact if the scales are within 2^17 of each
// other, rounded once below.
#include "checkpoint/mxfp4.h"

#include <cmath>
#include <random>

#include "support/spec_oracle.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

int code_at(const std::vector<uint8_t>& codes, int64_t i) {
  const int byte = codes[static_cast<size_t>(i / 2)];
  return i % 2 == 0 ? byte & 15 : byte >> 4;
}

struct Cast {
  std::vector<uint8_t> codes, scales;
  Mxfp4Cast facts;
  double value(int64_t i) const {
    return oracle_e2m1(code_at(codes, i)) * oracle_e4m3(scales[static_cast<size_t>(i / 16)]) *
           static_cast<double>(facts.tensor_scale);
  }
};

// One row.
Result<Cast> cast_row(const std::vector<uint8_t>& codes, const std::vector<uint8_t>& scales) {
  const auto cols = static_cast<int64_t>(codes.size()) * 2;
  Cast out;
  out.codes.resize(codes.size());
  out.scales.resize(static_cast<size_t>(cols / 16));
  NVFP4_MOE_ASSIGN(out.facts, cast_mxfp4(codes.data(), cols / 2, scales.data(), cols / 32, 0, 1,
                                         cols, out.codes.data(), out.scales.data()));
  return out;
}

TEST(Mxfp4, ExactForEveryTopExponentAndSpreadUpTo17) {
  std::mt19937_64 random(7);
  for (int top = 0; top <= 254; ++top) {
    std::vector<uint8_t> scales, codes;
    for (int spread = 0; spread <= 17 && top - spread >= 0; ++spread) {
      scales.push_back(static_cast<uint8_t>(top - spread));
      for (int i = 0; i < 16; ++i) codes.push_back(static_cast<uint8_t>(random() >> 50));
      codes.back() = 0x77;
    }
    auto cast = must(cast_row(codes, scales));
    EXPECT_EQ(cast->facts.rounded_blocks, 0u);
    EXPECT_EQ(cast->codes, codes);
    for (int64_t i = 0; i < static_cast<int64_t>(codes.size()) * 2; ++i) {
      ASSERT_EQ(cast->value(i), std::ldexp(oracle_e2m1(code_at(codes, i)),
                                           scales[static_cast<size_t>(i / 32)] - 127))
          << "top " << top << " element " << i;
    }
    if (top >= 9) {  // tensor scale 2^(k_max - 8), the largest block scale 2^8
      EXPECT_EQ(cast->facts.tensor_scale, std::ldexp(1.0f, top - 127 - 8));
      EXPECT_EQ(cast->scales[0], 0x78);
    }
  }
}

TEST(Mxfp4, BelowThatOneRoundingToTheSmallestScale) {
  for (int spread = 18; spread <= 24; ++spread) {
    std::vector<uint8_t> codes(32, 0);
    codes[0] = 0x07;  // the block that sets k_max: a 6
    for (int c = 0; c < 16; ++c)
      codes[static_cast<size_t>(16 + c / 2)] |= static_cast<uint8_t>(c << (c % 2 * 4));
    auto cast = must(cast_row(codes, {140, static_cast<uint8_t>(140 - spread)}));
    // the value of code 1.0 under scale 2^-9
    const double unit = std::ldexp(1.0, 140 - 127 - 8 - 9);
    for (int c = 0; c < 16; ++c) {
      const double exact = std::ldexp(oracle_e2m1(c), 140 - spread - 127);
      double best = 1e30;  // the nearest of the 16 values that the smallest scale offers
      for (int other = 0; other < 16; ++other)
        best = std::min(best, std::abs(oracle_e2m1(other) * unit - exact));
      EXPECT_EQ(std::abs(cast->value(32 + c) - exact), best) << spread << " code " << c;
    }
    EXPECT_EQ(cast->facts.rounded_blocks, 1u);  // the second half of that block is zeros: exact
    EXPECT_EQ(cast->scales[3], 0);
    const bool all_zero = 6 * std::ldexp(1.0, 17 - spread) <= 0.25;  // ties at 0.25 go down
    EXPECT_EQ(cast->scales[2], all_zero ? 0 : 1) << spread;
  }
}

TEST(Mxfp4, ZerosUnderAnyScaleCostNothing) {
  std::vector<uint8_t> codes(16 * 3, 0);
  codes[0] = 0x80;  // a -0 under a huge scale
  codes[16] = 0x21;
  auto cast = must(cast_row(codes, {250, 120, 0}));
  EXPECT_EQ(cast->facts.tensor_scale, std::ldexp(1.0f, 120 - 127 - 8));
  EXPECT_EQ(cast->facts.rounded_blocks, 0u);
  EXPECT_EQ(cast->value(32), std::ldexp(0.5, -7));
  EXPECT_EQ(cast->value(33), std::ldexp(1.0, -7));
  EXPECT_EQ(cast->value(1), 0.0);
  EXPECT_EQ(cast->codes[0], 0);
  auto zeros = must(cast_row(std::vector<uint8_t>(32, 0), {254, 0}));
  EXPECT_TRUE(std::isnormal(zeros->facts.tensor_scale));
}

TEST(Mxfp4, ANanScaleIsRefused) {
  EXPECT_THAT(cast_row(std::vector<uint8_t>(32, 0), {100, 255}),
              Refused(Code::kBadInput, "row 0 block 1: E8M0 scale is NaN (0xFF)"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
