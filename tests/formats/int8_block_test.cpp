// int8_block's quantizer against the contract's oracle, and the properties that kernels rely on.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/float_formats.h"
#include "core/quantize.h"
#include "core/random.h"
#include "support/spec_oracle.h"

namespace nvfp4_moe::internal::test {
namespace {

struct QuantizedRow {
  std::vector<int8_t> codes;
  std::vector<float> scales;
  QuantizeCounts counts;
  bool finite = false;

  explicit QuantizedRow(const std::vector<float>& x)
      : codes(x.size(), 99), scales(x.size() / 16, -1) {
    finite = quantize_row_int8_block(x, codes.data(), scales.data(), counts);
  }
};

// A row with blocks anywhere from subnormal to the largest numbers; some hold zeros, some a single
// element.
std::vector<float> row_of(DType dtype, uint64_t seed) {
  Random random(seed);
  std::vector<float> x;
  for (int b = 0; b < 64; ++b) {
    const int least = dtype == DType::kF16 ? -24 : -140, most = dtype == DType::kF16 ? 13 : 124;
    const double gain = std::ldexp(1.0, least + static_cast<int>(random.below(most - least)));
    const int kind = static_cast<int>(random.below(8));
    for (int i = 0; i < 16; ++i) {
      double value = gain * random.normal();
      if (kind == 0 || (kind == 1 && i != 5)) value = 0;
      const auto wide = static_cast<float>(value);
      x.push_back(dtype == DType::kF32    ? wide
                  : dtype == DType::kBf16 ? bf16_to_float(bf16_from_float(wide))
                                          : fp16_to_float(fp16_from_float(wide)));
    }
  }
  return x;
}

TEST(Int8Block, IsTheContractsDefinition) {
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    for (uint64_t seed = 0; seed < 60; ++seed) {
      const std::vector<float> x = row_of(dtype, seed);
      const QuantizedRow q(x);
      const OracleRow oracle = oracle_quantize_int8({x.begin(), x.end()});
      ASSERT_TRUE(q.finite);
      for (size_t i = 0; i < x.size(); ++i)
        ASSERT_EQ(double{q.scales[i / 16]} * q.codes[i], oracle.values[i])
            << to_string(dtype) << " " << x[i];
      EXPECT_EQ(q.counts.blocks, oracle.blocks);
      EXPECT_EQ(q.counts.zero_scales, oracle.zeroed);
      EXPECT_EQ(q.counts.saturated_scales + q.counts.saturated_codes, 0u);
    }
  }
}

TEST(Int8Block, TiesGoToTheEvenCodeAndTinyBlocksHaveTheLeastScale) {
  std::vector<float> ties(16, 0.0f);
  ties[0] = 127;  // s = 1
  const float values[] = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 62.5f, -63.5f};
  const int codes[] = {0, 2, 2, 0, -2, 62, -64};
  std::copy(std::begin(values), std::end(values), ties.begin() + 1);
  const QuantizedRow of_ties(ties);
  EXPECT_EQ(of_ties.scales[0], 1.0f);
  for (size_t i = 0; i < 7; ++i) EXPECT_EQ(of_ties.codes[1 + i], codes[i]) << values[i];

  std::vector<float> tiny(48, 0.0f);
  tiny[17] = 0x1p-117f;  // half a step: a tie, to 0
  tiny[33] = -std::numeric_limits<float>::denorm_min();
  tiny[34] = 3 * kInt8BlockMinScale;
  const QuantizedRow q(tiny);
  for (const float scale : q.scales) EXPECT_EQ(scale, kInt8BlockMinScale);
  for (size_t i = 0; i < 48; ++i) EXPECT_EQ(q.codes[i], i == 34 ? 3 : 0);
  EXPECT_EQ(q.counts.zero_scales, 1u);  // the second block; the first is zero
  EXPECT_TRUE(std::isnormal(kInt8BlockMinScale * 0x1p-9f * 0.5f));
  EXPECT_FALSE(std::isnormal(kInt8BlockMinScale / 2 * 0x1p-9f * 0.5f));
}

TEST(Int8Block, ARowWithNanOrInfIsNanThroughout) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInf, -kInf}) {
    std::vector<float> x(32, 1.0f);
    x[20] = bad;
    const QuantizedRow q(x);
    EXPECT_FALSE(q.finite);
    EXPECT_EQ(q.codes, std::vector<int8_t>(32, 0));
    for (const float scale : q.scales) EXPECT_TRUE(std::isnan(scale));
    EXPECT_EQ(q.counts.nonfinite_rows, 1u);
    EXPECT_EQ(q.counts.blocks, 0u);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
