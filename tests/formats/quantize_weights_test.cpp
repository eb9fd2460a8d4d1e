// The weight quantizer against two plain re-implementations of the contract, written here: exact
// (comparison of amax with boundary * 6s and of |x| with boundary * v s) and literal (divide in
// double, round once). If all three agree, the fast path is right and a double division never
// rounds onto a boundary.
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

struct Quantized {
  std::vector<uint8_t> codes;   // one per element
  std::vector<uint8_t> scales;  // one per block
  QuantizeCounts counts;
  double sum_sq = 0;
  double sum_sq_error = 0;
};

Quantized quantize(const std::vector<float>& x, int64_t rows, float s,
                   ScaleSearch search = ScaleSearch::kMax) {
  Quantized q;
  std::vector<uint8_t> packed(x.size() / 2, 0xAA);
  q.scales.assign(x.size() / 16, 0xAA);
  EXPECT_OK(quantize_weights(x, rows, static_cast<int64_t>(x.size()) / rows, s, search,
                             packed.data(), q.scales.data(), q.counts, &q.sum_sq, &q.sum_sq_error));
  for (const uint8_t byte : packed) {
    q.codes.push_back(byte & 15);
    q.codes.push_back(byte >> 4);
  }
  return q;
}

uint8_t code_of(float x, size_t byte, double s) {
  if (byte == 0) return 0;
  const double a = std::fabs(static_cast<double>(x));
  const size_t magnitude = e2m1_grid().round_quotient(a, e4m3_grid().magnitudes[byte] * s);
  EXPECT_EQ(magnitude, e2m1_grid().round(a / (e4m3_grid().magnitudes[byte] * s)))
      << "division moved a boundary";
  return static_cast<uint8_t>(magnitude | (std::signbit(x) ? 8u : 0u));
}

double block_amax(const float* x) {
  double amax = 0;
  for (int i = 0; i < 16; ++i) amax = std::max(amax, std::fabs(static_cast<double>(x[i])));
  return amax;
}

double error_of(const float* x, size_t byte, double s) {
  double sum = 0;
  for (int i = 0; i < 16; ++i) {
    const uint8_t code = code_of(x[i], byte, s);
    const double magnitude = e2m1_grid().magnitudes[code & 7] * e4m3_grid().magnitudes[byte] * s;
    const double error = x[i] - ((code & 8) != 0 ? -magnitude : magnitude);
    sum += error * error;
  }
  return sum;
}

void expect_matches_plain(const std::vector<float>& x, int64_t rows, float s) {
  const Quantized q = quantize(x, rows, s);
  QuantizeCounts counts;
  double sum_sq = 0;
  double sum_sq_error = 0;
  for (size_t b = 0; b < x.size() / 16; ++b) {
    const float* block = x.data() + b * 16;
    const double amax = block_amax(block);
    const size_t byte = e4m3_grid().round_quotient(amax, 6.0 * s);
    ASSERT_EQ(byte, e4m3_grid().round(amax / (6.0 * s))) << "division moved a boundary";
    ASSERT_EQ(q.scales[b], byte) << "block " << b << " amax " << amax << " s " << s;
    counts.blocks += 1;
    counts.saturated_scales += amax > 2688.0 * s;
    counts.zero_scales += amax > 0 && byte == 0;
    for (size_t i = 0; i < 16; ++i) {
      ASSERT_EQ(q.codes[b * 16 + i], code_of(block[i], byte, s))
          << block[i] << " byte " << byte << " s " << s;
      counts.saturated_codes += byte != 0 && std::fabs(static_cast<double>(block[i])) >
                                                 6.0 * e4m3_grid().magnitudes[byte] * s;
      sum_sq += static_cast<double>(block[i]) * block[i];
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

std::vector<float> normals(size_t count, uint32_t seed, float size, bool as_bf16) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  std::vector<float> x(count);
  for (float& value : x)
    value = as_bf16 ? bf16_to_float(bf16_from_float(normal(random))) : normal(random);
  return x;
}

float amax_of(const std::vector<float>& x) { return row_amax(x); }

TEST(QuantizeWeights, MatchesPlainOnNormalData) {
  for (const bool as_bf16 : {true, false}) {
    const std::vector<float> x = normals(16 * 1024, 1, 0.02f, as_bf16);
    expect_matches_plain(x, 16, tensor_scale_from_amax(static_cast<double>(amax_of(x))));
  }
}

TEST(QuantizeWeights, MatchesPlainUnderAnyScale) {
  std::mt19937 random(2);
  std::lognormal_distribution<float> wide(0, 4);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<float> x(256);
    for (size_t b = 0; b < x.size(); b += 16) {
      const float size = wide(random);
      for (size_t i = 0; i < 16; ++i) x[b + i] = normal(random) * size;
    }
    const float s = std::ldexp(static_cast<float>(random() % 0xFFFFFF + 1),
                               -24 - static_cast<int>(random() % 20));
    expect_matches_plain(x, 4, s);
  }
}

// Values on every boundary t * v * s (if that is a float) and one ulp to each side, for every scale
// byte.
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
        values.insert(values.end(), {at, std::nextafter(at, 0.0f), -std::nextafter(at, 3e38f)});
      }
      std::shuffle(values.begin(), values.end(), random);
      const auto amax = static_cast<float>(6.0 * e4m3_grid().magnitudes[byte] * s);
      for (size_t i = 0; i < values.size(); ++i) {
        if (x.size() % 16 == 0) x.push_back(amax);
        x.push_back(values[i]);
      }
      while (x.size() % 16 != 0) x.push_back(amax);
    }
    expect_matches_plain(x, 1, s);
  }
}

// amax on every boundary of E4M3 and one ulp to each side.
TEST(QuantizeWeights, MatchesPlainOnEveryScaleBoundary) {
  for (const float s : {1.0f, 0x1.555556p-3f, 0x1p-30f, 0.0123f}) {
    std::vector<float> x;
    for (size_t i = 0; i < 126; ++i) {
      const auto at = static_cast<float>(e4m3_grid().midpoint(i) * 6.0 * s);
      for (const float amax : {at, std::nextafter(at, 0.0f), std::nextafter(at, 3e38f)}) {
        for (int j = 0; j < 16; ++j)
          x.push_back(j == 5 ? -amax : amax * static_cast<float>(j) / 16.0f);
      }
    }
    expect_matches_plain(x, 1, s);
  }
}

TEST(QuantizeWeights, MatchesPlainAtTheEndsOfFloat) {
  constexpr float kMax = std::numeric_limits<float>::max();
  constexpr float kDenorm = std::numeric_limits<float>::denorm_min();
  std::vector<float> x;
  for (const float size : {kMax, 1.0f, 0x1p-126f, 0x1p-140f, kDenorm, 0.0f})
    for (int i = 0; i < 16; ++i)
      x.push_back((i % 2 != 0 ? -size : size) * (static_cast<float>(i + 1) / 16.0f));
  for (const float s : {kDenorm, 3 * kDenorm, 0x1p-126f, 1e-30f, 1.0f, 1e30f, kMax / 2688.0f, kMax})
    expect_matches_plain(x, 2, s);
}

TEST(QuantizeWeights, ZeroBlocks) {
  const Quantized q = quantize(std::vector<float>(32, 0.0f), 1, 1.0f);
  EXPECT_EQ(q.codes, std::vector<uint8_t>(32, 0));
  EXPECT_EQ(q.scales, std::vector<uint8_t>(2, 0));
  EXPECT_EQ(q.counts.zero_scales, 0u);
  EXPECT_EQ(tensor_scale_from_amax(0.0), 1.0f);
  EXPECT_EQ(tensor_scale_from_amax(1e-60), 1.0f) << "1 also where amax/2688 rounds to 0";
  EXPECT_EQ(tensor_scale_from_amax(2688.0), 1.0f);
  EXPECT_EQ(tensor_scale_from_amax(1.0), static_cast<float>(1.0 / 2688.0));
}

TEST(QuantizeWeights, RefusesNonfiniteWeightsByPlace) {
  std::vector<float> x(3 * 32, 1.0f);
  std::vector<uint8_t> codes(48), scales(6);
  QuantizeCounts counts;
  x[2 * 32 + 7] = std::numeric_limits<float>::infinity();
  const Status inf =
      quantize_weights(x, 3, 32, 1.0f, ScaleSearch::kMax, codes.data(), scales.data(), counts);
  EXPECT_EQ(inf.code(), Code::kBadInput);
  EXPECT_EQ(inf.message(), "row 2 column 7: expected a finite weight, got inf");
  EXPECT_EQ(counts.nonfinite_rows, 1u);
  x[32] = std::numeric_limits<float>::quiet_NaN();
  const Status nan =
      quantize_weights(x, 3, 32, 1.0f, ScaleSearch::kMse, codes.data(), scales.data(), counts);
  EXPECT_EQ(nan.message(), "row 1 column 0: expected a finite weight, got nan");
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
  for (const Status& refused :
       {status(2, 24, 1.0f), status(-1, 32, 1.0f), status(3, 32, 1.0f),
        status(int64_t{1} << 62, 64, 1.0f), status(2, 32, 0.0f), status(2, 32, -1.0f),
        status(2, 32, std::numeric_limits<float>::infinity()),
        status(2, 32, std::numeric_limits<float>::quiet_NaN())}) {
    EXPECT_THAT(refused, Refused(Code::kInvalidArgument, "expected"));
  }
}

// kMse: never worse than kMax, and exactly the best of the candidates that the header lists.
TEST(QuantizeWeights, MseSearchTakesTheBestNeighbour) {
  int better = 0;
  for (uint32_t seed = 0; seed < 40; ++seed) {
    const std::vector<float> x = normals(1024, 100 + seed, 1.0f, seed % 2 == 0);
    // Some seeds saturate (small s), some make subnormal and zero scales (large s).
    const float s =
        tensor_scale_from_amax(static_cast<double>(amax_of(x))) * (seed % 5 == 0   ? 0.25f
                                                                   : seed % 5 == 1 ? 200000.0f
                                                                                   : 1.0f);
    const Quantized mse = quantize(x, 2, s, ScaleSearch::kMse);
    const Quantized max = quantize(x, 2, s, ScaleSearch::kMax);
    EXPECT_LE(mse.sum_sq_error, max.sum_sq_error);
    EXPECT_EQ(mse.counts.saturated_scales, max.counts.saturated_scales);
    for (size_t b = 0; b < x.size() / 16; ++b) {
      const float* block = x.data() + b * 16;
      const double amax = block_amax(block);
      const size_t max_choice = max.scales[b];
      double best = error_of(block, max_choice, s);
      std::vector<size_t> winners = {max_choice};
      for (const double reach : {6.0, 4.0}) {
        const double quotient = amax / (reach * s);
        size_t low = 0;
        while (low < 126 && e4m3_grid().magnitudes[low + 1] <= quotient) ++low;
        const size_t high = e4m3_grid().magnitudes[low] < quotient && low < 126 ? low + 1 : low;
        for (const size_t candidate : {low, high}) {
          const double error = error_of(block, candidate, s);
          if (error < best) winners.clear();
          if (error <= best && (winners.empty() || max_choice != winners[0]))
            winners.push_back(candidate);
          best = std::min(best, error);
        }
      }
      ASSERT_THAT(winners, testing::Contains(mse.scales[b])) << "seed " << seed << " block " << b;
      if (winners[0] == max_choice) {
        ASSERT_EQ(mse.scales[b], max_choice) << "ties go to the max choice";
      }
      better += mse.scales[b] != max_choice;
      for (size_t i = 0; i < 16; ++i)
        ASSERT_EQ(mse.codes[b * 16 + i], code_of(block[i], mse.scales[b], s));
    }
  }
  EXPECT_GT(better, 500);
}

// 12 = 6 * 2 = 4 * 3: no error under either scale, so the max choice 2 stays. With only 8 = 4 * 2
// the candidates are 8/6 rounded and 2: here the second is strictly better.
TEST(QuantizeWeights, MseTiesGoToTheMaxChoice) {
  std::vector<float> x(16, 0.0f);
  x[3] = 12.0f;
  EXPECT_EQ(quantize(x, 1, 1.0f, ScaleSearch::kMse).scales[0], 0x40);
  x[3] = 8.0f;
  const Quantized q = quantize(x, 1, 1.0f, ScaleSearch::kMse);
  EXPECT_EQ(q.scales[0], 0x40);
  EXPECT_EQ(q.sum_sq_error, 0.0);
  EXPECT_EQ(quantize(x, 1, 1.0f, ScaleSearch::kMax).scales[0],
            e4m3_grid().round_quotient(8.0, 6.0));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
