// The searches for block scales against plain ones. kSweep, with and without weights, against an
// exhaustive search: all 126 positive E4M3 scales, each code by comparison with midpoints, errors
// in double. The library tries only some scales, in float. If both choose the same byte, those
// scales include the best one and float is precise enough. kMse against the best neighbour.
#include <cmath>
#include <limits>
#include <random>

#include "core/float_formats.h"
#include "formats/plain_quantizer.h"

namespace nvfp4_moe::internal::test {
namespace {

// All positive scales; ties go to the scale of kMax, then to the smallest. With weights, scales
// that clip and have a larger unweighted error than the scale of kMax are excluded.
size_t exhaustive(const float* x, double s, const float* weights) {
  size_t best = max_scale(x, s);
  const double of_max = error_of(x, best, s);
  double least = error_of(x, best, s, weights);
  for (size_t byte = 1; byte < 127; ++byte) {
    const bool clips =
        block_amax(x) > 6.0 * s * e4m3_grid().magnitudes[std::min<size_t>(byte + 1, 126)];
    if (weights != nullptr && clips && error_of(x, byte, s) > of_max) continue;
    const double error = error_of(x, byte, s, weights);
    if (error < least) best = byte, least = error;
  }
  return best;
}

// The least error of the scale of kMax and of the scales around amax / 6 and amax / 4.
double least_of_neighbours(const float* x, double s, const float* weights) {
  double least = error_of(x, max_scale(x, s), s, weights);
  for (const double reach : {6.0, 4.0}) {
    const double quotient = block_amax(x) / (reach * s);
    size_t low = 0;
    while (low < 126 && e4m3_grid().magnitudes[low + 1] <= quotient) ++low;
    const size_t high = e4m3_grid().magnitudes[low] < quotient && low < 126 ? low + 1 : low;
    for (const size_t byte : {low, high}) least = std::min(least, error_of(x, byte, s, weights));
  }
  return least;
}

enum class Data { kNormal, kLaplace, kHeavy, kOutlier, kGrid, kFew, kData };

std::vector<float> data(Data kind, size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::exponential_distribution<float> exponential;
  std::student_t_distribution<float> student(3);
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) {
    switch (kind) {
      case Data::kNormal: x[i] = bf16_to_float(bf16_from_float(normal(random))); break;
      case Data::kLaplace: x[i] = exponential(random) * (random() % 2 == 0 ? 1.0f : -1.0f); break;
      case Data::kHeavy: x[i] = student(random); break;
      case Data::kOutlier: x[i] = normal(random) * (random() % 16 == 0 ? 40.0f : 1.0f); break;
      // Halves: many blocks that several scales hold exactly, or equally badly.
      case Data::kGrid:
        x[i] = static_cast<float>(static_cast<int>(random() % 25) - 12) * 0.5f;
        break;
      case Data::kFew: x[i] = random() % 6 == 0 ? std::fabs(normal(random)) + 0.5f : 0.0f; break;
      case Data::kData: break;
    }
  }
  return x;
}

// None; like activations; many zeros; over all of float; only small elements matter.
enum class Weights { kNone, kMoments, kHoles, kWide, kSmall, kWeights };

std::vector<float> weights_of(Weights kind, const std::vector<float>& x, uint32_t seed) {
  if (kind == Weights::kNone) return {};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> w(x.size());
  for (size_t i = 0; i < w.size(); ++i) {
    switch (kind) {
      case Weights::kMoments: w[i] = std::exp(2.0f * normal(random)); break;
      case Weights::kHoles: w[i] = random() % 3 == 0 ? std::fabs(normal(random)) : 0.0f; break;
      case Weights::kWide: w[i] = std::ldexp(1.0f, static_cast<int>(random() % 270) - 145); break;
      case Weights::kSmall: w[i] = 1.0f / (1.0f + x[i] * x[i] * x[i] * x[i]); break;
      case Weights::kNone:
      case Weights::kWeights: break;
    }
  }
  return w;
}

void expect_exhaustive(const std::vector<float>& x, float s, const std::vector<float>& weights,
                       const std::string& what, size_t* moved = nullptr) {
  const Quantized sweep = quantize(x, 1, s, ScaleSearch::kSweep, weights);
  for (size_t b = 0; b < x.size() / kBlock; ++b) {
    const float* block = x.data() + b * kBlock;
    const float* w = weights.empty() ? nullptr : weights.data() + b * kBlock;
    const size_t best = exhaustive(block, s, w);
    ASSERT_EQ(sweep.scales[b], best) << what << ", block " << b << ", s " << s;
    if (moved != nullptr) *moved += best != max_scale(block, s);
    for (size_t i = 0; i < kBlock; ++i)
      ASSERT_EQ(sweep.codes[b * kBlock + i], code_of(block[i], best, s)) << what;
  }
}

// Tensor scales that spread blocks over all of E4M3: normal, saturated, among the smallest scales,
// and below them.
TEST(ScaleSweep, IsTheBestOfAllScales) {
  for (int kind = 0; kind < static_cast<int>(Data::kData); ++kind) {
    for (int weighted = 0; weighted < static_cast<int>(Weights::kWeights); ++weighted) {
      const std::string what =
          "data " + std::to_string(kind) + ", weights " + std::to_string(weighted);
      size_t moved = 0;
      for (uint32_t seed = 0; seed < 12; ++seed) {
        const std::vector<float> x = data(static_cast<Data>(kind), 64 * kBlock, seed + 1);
        const std::vector<float> w = weights_of(static_cast<Weights>(weighted), x, seed + 77);
        const float factors[] = {1.0f,    1.0f,      1.7f,      0.3f,      0.07f,     0x1p-9f,
                                 0x1p12f, 0x1.3p15f, 0x1.7p16f, 0x1.1p17f, 0x1.9p19f, 0x1p-60f};
        expect_exhaustive(x, usual_scale(x) * factors[seed], w,
                          what + ", seed " + std::to_string(seed), &moved);
      }
      EXPECT_GT(moved, 100u) << what << ": kMax would do";
    }
  }
}

// Blocks that no argument of ours considered: every element anywhere among the midpoints and grid
// values of some scale of E4M3, so that ties, and scales at both ends of the sweep, win.
TEST(ScaleSweep, IsTheBestWhereScalesTie) {
  std::mt19937 random(5);
  size_t lowest = 0, highest = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::vector<float> x(kBlock);
    const size_t byte = random() % 3 == 0 ? 1 + random() % 20 : 1 + random() % 126;
    const double unit = e4m3_grid().magnitudes[byte];
    const size_t top = 1 + random() % 7;
    for (float& value : x) {
      const size_t i = random() % (top + 1);
      value = static_cast<float>(
          (random() % 2 == 0 ? e2m1_grid().magnitudes[i] : e2m1_grid().midpoint(i)) * unit);
    }
    expect_exhaustive(x, 1.0f, {}, "trial " + std::to_string(trial));
    const double amax = block_amax(x.data());
    if (amax == 0) continue;
    const double ratio = e4m3_grid().magnitudes[exhaustive(x.data(), 1.0, nullptr)] / amax;
    lowest += ratio < 1 / 6.6;
    highest += ratio > 1 / 3.9;
  }
  // The best scale may be beyond the neighbours of amax/6 and amax/4, on both sides.
  EXPECT_GT(lowest, 50u);
  EXPECT_GT(highest, 50u);
}

TEST(ScaleSweep, HoldsAtTheEndsOfFloat) {
  constexpr float kMax = std::numeric_limits<float>::max();
  constexpr float kDenorm = std::numeric_limits<float>::denorm_min();
  std::vector<float> x;
  for (const float size : {kMax, 1.0f, 0x1p-126f, 0x1p-140f, kDenorm, 0.0f})
    for (int i = 0; i < 16; ++i)
      x.push_back((i % 2 != 0 ? -size : size) * (static_cast<float>(i * i + 1) / 256.0f));
  const std::vector<float> w = weights_of(Weights::kWide, x, 3);
  for (const float s :
       {kDenorm, 3 * kDenorm, 0x1p-126f, 1e-30f, 1.0f, 1e30f, kMax / 2688.0f, kMax}) {
    expect_exhaustive(x, s, {}, "unweighted");
    expect_exhaustive(x, s, w, "weighted");
  }
  // Far beyond 448 the largest element is lost under any scale, and the others may want less.
  std::vector<float> saturated(kBlock, 6.0f * 416);
  saturated[9] = 3600.0f;
  EXPECT_EQ(quantize(saturated, 1, 1.0f, ScaleSearch::kSweep).scales[0], 0x7D) << "416";
  expect_exhaustive(saturated, 1.0f, {}, "saturated");
}

// kMse takes the scale of kMax unless a neighbour of amax / 6 or amax / 4 has a smaller error.
// Some seeds saturate (small s), some have subnormal and zero scales (large s).
TEST(ScaleSearches, MseTakesTheBestNeighbour) {
  for (const Weights kind : {Weights::kNone, Weights::kMoments}) {
    size_t moved = 0;
    for (uint32_t seed = 0; seed < 40; ++seed) {
      const std::vector<float> x = data(Data::kNormal, 64 * kBlock, 100 + seed);
      const std::vector<float> row(x.begin(), x.begin() + 32 * kBlock);
      const std::vector<float> weights = weights_of(kind, row, seed + 5);  // of the columns
      const float factor = seed % 5 == 0 ? 0.25f : seed % 5 == 1 ? 200000.0f : 1.0f;
      const float s = usual_scale(x) * factor;
      const Quantized mse = quantize(x, 2, s, ScaleSearch::kMse, weights);
      EXPECT_EQ(mse.counts.saturated_scales, quantize(x, 2, s).counts.saturated_scales);
      for (size_t b = 0; b < x.size() / kBlock; ++b) {
        const float* block = x.data() + b * kBlock;
        const float* w = weights.empty() ? nullptr : weights.data() + b % 32 * kBlock;
        const double least = least_of_neighbours(block, s, w);
        const size_t of_max = max_scale(block, s);
        ASSERT_EQ(error_of(block, mse.scales[b], s, w), least) << "seed " << seed << " block " << b;
        ASSERT_EQ(mse.scales[b] == of_max, error_of(block, of_max, s, w) == least);
        for (size_t i = 0; i < kBlock; ++i)
          ASSERT_EQ(mse.codes[b * kBlock + i], code_of(block[i], mse.scales[b], s));
        moved += mse.scales[b] != of_max;
      }
    }
    EXPECT_GT(moved, 500u);
  }
}

TEST(ScaleSearches, TiesKeepTheScaleOfMax) {
  for (const ScaleSearch search : {ScaleSearch::kMse, ScaleSearch::kSweep}) {
    std::vector<float> x(kBlock, 0.0f);
    EXPECT_EQ(quantize(x, 1, 1.0f, search).scales[0], 0);
    x[3] = 12.0f;  // 6 * 2 = 4 * 3 = 3 * 4 = 2 * 6
    EXPECT_EQ(quantize(x, 1, 1.0f, search).scales[0], 0x40);
    x = data(Data::kNormal, kBlock, 9);  // without any weight all errors are 0
    EXPECT_EQ(quantize(x, 1, usual_scale(x), search, std::vector<float>(kBlock)).scales[0], 0x7E);
  }
}

TEST(WeightedScales, AreRefusedByName) {
  const std::vector<float> x(2 * kBlock, 1.0f);
  std::vector<uint8_t> codes(kBlock), scales(2);
  QuantizeCounts counts;
  const auto status = [&](ScaleSearch search, const std::vector<float>& weights) {
    return quantize_weights(x, 2, kBlock, 1.0f, search, codes.data(), scales.data(), counts,
                            nullptr, nullptr, weights);
  };
  std::vector<float> w(kBlock, 1.0f);
  EXPECT_OK(status(ScaleSearch::kSweep, w));
  EXPECT_THAT(status(ScaleSearch::kMax, w),
              Refused(Code::kInvalidArgument, "channel_weights: expected search mse or sweep"));
  EXPECT_THAT(status(ScaleSearch::kSweep, std::vector<float>(kBlock + 1, 1.0f)),
              Refused(Code::kInvalidArgument, "expected one for each of 16 columns, got 17"));
  for (const float wrong :
       {-1.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    w[7] = wrong;
    EXPECT_THAT(status(ScaleSearch::kMse, w),
                Refused(Code::kInvalidArgument,
                        "channel_weights: expected finite numbers of at least 0, got " +
                            std::to_string(wrong) + " for column 7"));
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
