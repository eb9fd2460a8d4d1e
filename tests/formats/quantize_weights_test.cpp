// The weight quantizer against two plain re-implementations of the contract: exact
// (formats/plain_quantizer.h: comparison of amax with boundary * 6s and of |x| with boundary * v s)
// and literal (divide in double, round once). If all three agree, the fast path is right and a
// double division never rounds onto a boundary.
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "core/float_formats.h"
#include "formats/plain_quantizer.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr float kMax = std::numeric_limits<float>::max(),
                kDenorm = std::numeric_limits<float>::denorm_min(),
                kInf = std::numeric_limits<float>::infinity(),
                kNan = std::numeric_limits<float>::quiet_NaN();

void expect_matches_plain(const std::vector<float>& x, int64_t rows, float s) {
  const Quantized q = quantize(x, rows, s);
  QuantizeCounts counts;
  double sum_sq = 0, sum_sq_error = 0;
  for (size_t b = 0; b < x.size() / kBlock; ++b) {
    const float* block = x.data() + b * kBlock;
    const double amax = block_amax(block);
    const size_t byte = max_scale(block, s);
    ASSERT_EQ(byte, e4m3_grid().round(amax / (6.0 * s))) << "division moved a boundary";
    ASSERT_EQ(q.scales[b], byte) << "block " << b << " amax " << amax << " s " << s;
    const double unit = e4m3_grid().magnitudes[byte] * s;
    counts.blocks += 1;
    counts.saturated_scales += amax > 2688.0 * s;
    counts.zero_scales += amax > 0 && byte == 0;
    for (size_t i = 0; i < kBlock; ++i) {
      const double a = std::fabs(static_cast<double>(block[i]));
      if (byte != 0) {
        ASSERT_EQ(magnitude_of(block[i], byte, s), e2m1_grid().round(a / unit))
            << "division moved a boundary";
      }
      ASSERT_EQ(q.codes[b * kBlock + i], code_of(block[i], byte, s))
          << block[i] << " byte " << byte << " s " << s;
      counts.saturated_codes += byte != 0 && a > 6.0 * unit;
      sum_sq += a * a;
    }
    sum_sq_error += error_of(block, byte, s);
  }
  EXPECT_EQ(q.counts.blocks, counts.blocks);
  EXPECT_EQ(q.counts.saturated_scales, counts.saturated_scales);
  EXPECT_EQ(q.counts.zero_scales, counts.zero_scales);
  EXPECT_EQ(q.counts.saturated_codes, counts.saturated_codes);
  // Sums of n non-negative doubles in any order agree within n roundings.
  const double n = static_cast<double>(x.size()) * 0x1p-52;
  EXPECT_NEAR(q.sum_sq, sum_sq, n * sum_sq);
  EXPECT_NEAR(q.sum_sq_error, sum_sq_error, n * sum_sq_error);
}

TEST(QuantizeWeights, MatchesPlainUnderAnyScale) {
  std::mt19937 random(2);
  std::lognormal_distribution<float> wide(0, 4);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<float> x(256);
    for (size_t b = 0; b < x.size(); b += kBlock) {
      const float size = wide(random);
      for (size_t i = 0; i < kBlock; ++i) {
        const float value = normal(random) * size;
        x[b + i] = trial % 2 == 0 ? value : bf16_to_float(bf16_from_float(value));
      }
    }
    const float any = std::ldexp(static_cast<float>(random() % 0xFFFFFF + 1),
                                 -24 - static_cast<int>(random() % 20));
    expect_matches_plain(x, 4, trial % 10 == 0 ? usual_scale(x) : any);
  }
}

// Values on every boundary t * v * s (if that is a float) and one ulp to each side, for every scale
// byte; then amax on every boundary of E4M3 and one ulp to each side.
TEST(QuantizeWeights, MatchesPlainOnEveryBoundary) {
  std::mt19937 random(4);
  for (const float s :
       {1.0f, 0x1p-20f, 0x1.fffffep-9f, 0x1.555556p-3f, 0.0123f, 0x1.000002p5f, 3.0f}) {
    std::vector<float> x;
    for (size_t byte = 1; byte < 127; ++byte) {
      std::vector<float> values;
      for (size_t i = 0; i < 7; ++i) {
        const auto at =
            static_cast<float>(e2m1_grid().midpoint(i) * e4m3_grid().magnitudes[byte] * s);
        values.insert(values.end(), {at, std::nextafter(at, 0.0f), -std::nextafter(at, kMax)});
      }
      std::shuffle(values.begin(), values.end(), random);
      const auto amax = static_cast<float>(6.0 * e4m3_grid().magnitudes[byte] * s);
      for (const float value : values) {
        if (x.size() % kBlock == 0) x.push_back(amax);
        x.push_back(value);
      }
      while (x.size() % kBlock != 0) x.push_back(amax);
    }
    for (size_t i = 0; i < 126; ++i) {
      const auto at = static_cast<float>(e4m3_grid().midpoint(i) * 6.0 * s);
      for (const float amax : {at, std::nextafter(at, 0.0f), std::nextafter(at, kMax)})
        for (int j = 0; j < 16; ++j)
          x.push_back(j == 5 ? -amax : amax * static_cast<float>(j) / 16.0f);
    }
    expect_matches_plain(x, 1, s);
  }
}

TEST(QuantizeWeights, MatchesPlainAtTheEndsOfFloat) {
  std::vector<float> x;
  for (const float size : {kMax, 1.0f, 0x1p-126f, 0x1p-140f, kDenorm, 0.0f})
    for (int i = 0; i < 16; ++i)
      x.push_back((i % 2 != 0 ? -size : size) * (static_cast<float>(i + 1) / 16.0f));
  for (const float s : {kDenorm, 3 * kDenorm, 0x1p-126f, 1e-30f, 1.0f, 1e30f, kMax / 2688.0f, kMax})
    expect_matches_plain(x, 2, s);
  EXPECT_EQ(tensor_scale_from_amax(0.0), 1.0f);
  EXPECT_EQ(tensor_scale_from_amax(1e-60), 1.0f) << "1 also where amax/2688 rounds to 0";
  EXPECT_EQ(tensor_scale_from_amax(2688.0), 1.0f);
  EXPECT_EQ(tensor_scale_from_amax(1.0), static_cast<float>(1.0 / 2688.0));
}

TEST(QuantizeWeights, RefusesNonfiniteWeightsByPlace) {
  std::vector<float> x(3 * 32, 1.0f);
  std::vector<uint8_t> codes(48), scales(6);
  QuantizeCounts counts;
  const auto refused = [&](ScaleSearch search) {
    return quantize_weights(x, 3, 32, 1.0f, search, codes.data(), scales.data(), counts);
  };
  x[2 * 32 + 7] = kInf;
  EXPECT_THAT(refused(ScaleSearch::kMax),
              Refused(Code::kBadInput, "row 2 column 7: expected a finite weight, got inf"));
  EXPECT_EQ(counts.nonfinite_rows, 1u);
  x[32] = kNan;
  EXPECT_THAT(refused(ScaleSearch::kMse),
              Refused(Code::kBadInput, "row 1 column 0: expected a finite weight, got nan"));
}

TEST(QuantizeWeights, RefusesShapesAndScales) {
  const std::vector<float> x(64, 1.0f);
  std::vector<uint8_t> codes(32), scales(4);
  QuantizeCounts counts;
  const auto status = [&](int64_t rows, int64_t cols, float s) {
    return quantize_weights(x, rows, cols, s, ScaleSearch::kMax, codes.data(), scales.data(),
                            counts);
  };
  EXPECT_OK(status(2, 32, 1.0f));
  EXPECT_OK(status(0, 32, 1.0f));
  for (const Status& refused : {status(2, 24, 1.0f), status(-1, 32, 1.0f), status(3, 32, 1.0f),
                                status(int64_t{1} << 62, 64, 1.0f), status(2, 32, 0.0f),
                                status(2, 32, -1.0f), status(2, 32, kInf), status(2, 32, kNan)})
    EXPECT_THAT(refused, Refused(Code::kInvalidArgument, "expected"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
