// The activation quantizers against comparison-based oracles.
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "core/float_formats.h"
#include "core/quantize.h"
#include "formats/grid.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                kInf = std::numeric_limits<float>::infinity();

struct Row {
  bool finite = false;
  std::vector<uint8_t> codes;   // one per element
  std::vector<uint8_t> scales;  // one per block
  QuantizeCounts counts;
};

template <class Quantize>
Row run(const Quantize& quantize, const std::vector<float>& x, float scale) {
  Row row;
  std::vector<uint8_t> packed(x.size() / 2, 0xAA);
  row.scales.assign(x.size() / 16, 0xAA);
  row.finite = quantize(x, scale, packed.data(), row.scales.data(), row.counts);
  for (const uint8_t byte : packed) {
    row.codes.push_back(byte & 15);
    row.codes.push_back(byte >> 4);
  }
  return row;
}
Row exact(const std::vector<float>& x, float scale) { return run(quantize_row_exact, x, scale); }
Row vllm_order(const std::vector<float>& x, float scale) {
  return run(quantize_row_vllm_order, x, scale);
}

float bf16(unsigned bits) { return std::bit_cast<float>(bits << 16); }

uint8_t signed_code(size_t magnitude, float x) {
  return static_cast<uint8_t>(magnitude | (std::signbit(x) ? 8u : 0u));
}

// All finite non-negative bf16 as the only value of a block: its byte is the exact RNE of amax/(6
// s), at every s.
TEST(ExactMode, EveryBf16AmaxGivesTheExactlyRoundedScale) {
  for (const int k : {-126, -60, -9, -1, 0, 1, 7, 40}) {
    const double s = std::ldexp(1.0, k);
    int informative = 0;
    for (unsigned bits = 0; bits < 0x7F80; ++bits) {
      std::vector<float> block(16, 0.0f);
      block[bits % 16] = bf16(bits);
      const Row row = exact(block, static_cast<float>(s));
      const size_t expected = e4m3_grid().round_quotient(static_cast<double>(bf16(bits)), 6.0 * s);
      ASSERT_EQ(row.scales[0], expected) << "amax " << bf16(bits) << " scale 2^" << k;
      ASSERT_EQ(row.counts.saturated_scales, bf16(bits) > 2688.0 * s ? 1u : 0u);
      ASSERT_EQ(row.counts.zero_scales, expected == 0 && bits != 0 ? 1u : 0u);
      informative += expected != 0 && expected != 126;
    }
    if (k == 0) {
      EXPECT_GT(informative, 2000);
    }
  }
}

// All (E4M3 scale, bf16 x) pairs that can occur in a block: x up to the largest bf16 amax that
// rounds to that scale. The quotient in float decides as the exact quotient does.
TEST(ExactMode, EveryPairOfScaleAndBf16GivesTheExactlyRoundedCode) {
  std::vector<unsigned> largest(127, 0);
  for (unsigned bits = 1; bits <= 0x4528; ++bits)  // 0x4528 is 2688
    largest[e4m3_grid().round_quotient(static_cast<double>(bf16(bits)), 6.0)] = bits;
  EXPECT_EQ(bf16(largest[126]), 2688.0f);
  int64_t pairs = 0;
  for (unsigned byte = 1; byte < 127; ++byte) {
    const double v = e4m3_grid().magnitudes[byte];
    std::vector<float> x;
    for (unsigned bits = 0; bits <= largest[byte]; ++bits) {
      if (x.size() % 16 == 0) x.push_back(bf16(largest[byte]));  // fixes the block's scale
      x.push_back(bits % 2 == 0 ? bf16(bits) : -bf16(bits));
    }
    x.resize((x.size() + 15) / 16 * 16, bf16(largest[byte]));
    const Row row = exact(x, 1.0f);
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(row.scales[i / 16], byte);
      const double a = std::fabs(static_cast<double>(x[i]));
      ASSERT_EQ(row.codes[i], signed_code(e2m1_grid().round_quotient(a, v), x[i]))
          << "x " << x[i] << " v " << v;
    }
    pairs += static_cast<int64_t>(x.size());
  }
  EXPECT_GT(pairs, 2000000);
}

// fp32 hidden: the contract's float operations, one by one.
TEST(ExactMode, FollowsItsFloatOperationsOnFp32) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::lognormal_distribution<float> spread(0, 2);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<float> x(32);
    const float size = spread(random);
    for (float& value : x) value = normal(random) * size;
    const float s = std::ldexp(1.0f, static_cast<int>(random() % 16) - 12);
    const Row row = exact(x, s);
    ASSERT_TRUE(row.finite);
    for (size_t block = 0; block < 2; ++block) {
      float amax = 0;
      for (size_t i = 0; i < 16; ++i) amax = std::max(amax, std::fabs(x[block * 16 + i]));
      const volatile float scaled = amax / s;
      const volatile float sixth = scaled * 0x1.555556p-3f;
      const size_t byte = e4m3_grid().round(static_cast<double>(sixth));
      ASSERT_EQ(row.scales[block], byte);
      for (size_t i = block * 16; i < block * 16 + 16; ++i) {
        const volatile float quotient =
            (x[i] / s) / static_cast<float>(e4m3_grid().magnitudes[byte]);
        const size_t magnitude =
            byte == 0 ? 0 : e2m1_grid().round(std::fabs(static_cast<double>(quotient)));
        ASSERT_EQ(row.codes[i], byte == 0 ? 0 : signed_code(magnitude, x[i]));
      }
    }
  }
}

TEST(ExactMode, CountsWhatItSaturates) {
  std::vector<float> x(64, 0.0f);
  x[0] = 2688.0f;    // scale exactly 448: not saturated
  x[16] = 5000.0f;   // scale saturates, and the quotient 5000/448 too
  x[17] = 2700.0f;   // quotient above 6
  x[32] = 0x1p-12f;  // scale rounds to 0
  Row row = exact(x, 1.0f);
  EXPECT_EQ(row.scales, (std::vector<uint8_t>{0x7E, 0x7E, 0, 0}));
  EXPECT_EQ(row.codes[32], 0) << "a block whose scale rounds to 0 has all codes 0";
  EXPECT_EQ(row.counts.nonfinite_rows, 0u);
  row.counts += QuantizeCounts(row.counts);
  EXPECT_EQ(row.counts.blocks, 2 * 4u);
  EXPECT_EQ(row.counts.saturated_scales, 2 * 1u);
  EXPECT_EQ(row.counts.saturated_codes, 2 * 2u);
  EXPECT_EQ(row.counts.zero_scales, 2 * 1u);
}

TEST(ExactMode, NonfiniteRowsAreFlaggedAndZero) {
  for (const float bad : {kNan, -kNan, kInf, -kInf}) {
    for (const size_t where : {0u, 17u, 47u}) {
      std::vector<float> x(48, 1.0f);
      x[where] = bad;
      for (const Row& row : {exact(x, 1.0f), vllm_order(x, 0.01f)}) {
        EXPECT_FALSE(row.finite);
        EXPECT_EQ(row.counts.nonfinite_rows, 1u);
        EXPECT_EQ(row.counts.blocks, 0u);
        EXPECT_EQ(row.codes, std::vector<uint8_t>(48, 0));
        EXPECT_EQ(row.scales, std::vector<uint8_t>(3, 0));
      }
    }
  }
}

TEST(ExactMode, ZerosAndTheEndsOfFloat) {
  const Row zeros = exact(std::vector<float>(32, -0.0f), 1.0f);
  EXPECT_TRUE(zeros.finite);
  EXPECT_EQ(zeros.codes, std::vector<uint8_t>(32, 0)) << "a zero scale zeroes -0 too";
  EXPECT_EQ(zeros.counts.zero_scales, 0u);
  constexpr float kMax = std::numeric_limits<float>::max();
  EXPECT_EQ(exact(std::vector<float>(16, -kMax), 0x1p127f).scales[0],
            e4m3_grid().round_quotient(double{kMax}, 6 * 0x1p127));
}

TEST(DynamicTokenScale, IsTheSmallestPowerOfTwoThatHolds) {
  const auto check = [](float amax) {
    const float s = dynamic_token_scale(amax);
    int exponent = -126;  // brute force, upwards
    while (std::ldexp(2688.0, exponent) < static_cast<double>(amax)) ++exponent;
    ASSERT_EQ(s, std::ldexp(1.0f, exponent)) << amax;
    ASSERT_TRUE(is_power_of_two(s));
  };
  for (unsigned bits = 1; bits < 0x7F80; ++bits) check(bf16(bits));
  for (int k = -126; k <= 116; ++k) {
    const float edge = std::ldexp(2688.0f, k);
    for (const float amax : {edge, std::nextafter(edge, 0.0f), std::nextafter(edge, 3e38f)})
      check(amax);
  }
  for (uint32_t bits = 1; bits < 0x7F800000u; bits += 99991) check(std::bit_cast<float>(bits));
  check(std::numeric_limits<float>::denorm_min());
  check(std::numeric_limits<float>::max());
  EXPECT_EQ(dynamic_token_scale(0.0f), 1.0f);
  EXPECT_TRUE(std::isnan(dynamic_token_scale(kInf)));
  EXPECT_TRUE(std::isnan(dynamic_token_scale(kNan)));
}

// tensor_scale of mode static.
Result<float> rounded_up(float x) {
  return static_row_scale(ActivationFormat::kNvfp4, "scale", x, 1.0f);
}

TEST(PowersOfTwo, RoundUpAndRecognise) {
  for (int k = -126; k <= 127; ++k) {
    const float p = std::ldexp(1.0f, k);
    EXPECT_TRUE(is_power_of_two(p));
    EXPECT_FALSE(is_power_of_two(std::nextafter(p, 3.4e38f)));
    EXPECT_EQ(rounded_up(p).value(), p);
    EXPECT_EQ(rounded_up(std::nextafter(p, 0.0f)).value(), p);
    if (k < 127) {
      EXPECT_EQ(rounded_up(std::nextafter(p, 3.4e38f)).value(), 2 * p);
    }
  }
  EXPECT_EQ(rounded_up(1e-40f).value(), 0x1p-126f);
  EXPECT_EQ(rounded_up(3e38f).status().message(),
            "scale: expected a row scale of at most 2^127, got 3.00000001e+38 times 1");
  for (const float no : {0.0f, -1.0f, -2.0f, 3.0f, 0x1p-127f, kInf, kNan})
    EXPECT_FALSE(is_power_of_two(no)) << no;
}

// vllm_order: each line of vLLM's kernel as one float operation.
TEST(VllmOrderMode, FollowsTheOrderOfOperations) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::lognormal_distribution<float> spread(-3, 5);
  int zero_blocks = 0;
  int saturated = 0;
  int order_matters = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::vector<float> x(16);
    const float size = spread(random);
    for (float& value : x) value = bf16_to_float(bf16_from_float(normal(random) * size));
    // Every other scale puts amax next to a boundary of E4M3, at which the order of the
    // multiplications determines the byte.
    const float beside =
        row_amax(x) /
        static_cast<float>(6.0 * e4m3_grid().midpoint(static_cast<size_t>(random() % 126)));
    const float input_scale =
        trial % 2 == 0 && beside > 0 ? beside : 0.37f * spread(random) / 2688.0f;
    const Row row = vllm_order(x, input_scale);
    const volatile float global = 1.0f / input_scale;
    float amax = 0;
    for (const float value : x) amax = std::max(amax, std::fabs(value));
    const volatile float rcp6 = 1.0f / 6.0f;
    const volatile float sixth = amax * rcp6;
    const volatile float scale = global * sixth;
    const size_t byte = e4m3_grid().round(static_cast<double>(scale));
    ASSERT_EQ(row.scales[0], byte);
    const volatile float scaled = global * amax;
    const volatile float other_order = scaled * rcp6;
    order_matters += e4m3_grid().round(static_cast<double>(other_order)) != byte;
    saturated += row.counts.saturated_scales != 0;
    ASSERT_EQ(row.counts.saturated_scales, scale > 448.0f ? 1u : 0u);
    zero_blocks += byte == 0;
    const volatile float rcp_global = 1.0f / global;
    const volatile float product = static_cast<float>(e4m3_grid().magnitudes[byte]) * rcp_global;
    const volatile float factor = 1.0f / product;
    for (size_t i = 0; i < 16; ++i) {
      const volatile float quotient = x[i] * factor;
      const size_t magnitude =
          byte == 0 ? 0 : e2m1_grid().round(std::fabs(static_cast<double>(quotient)));
      ASSERT_EQ(row.codes[i], byte == 0 ? 0 : signed_code(magnitude, x[i])) << x[i];
    }
  }
  EXPECT_GT(zero_blocks, 100);
  EXPECT_GT(saturated, 100);
  EXPECT_GT(order_matters, 100);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
