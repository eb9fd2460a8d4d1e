// kSweep and weighted errors against an exhaustive search: all 126 positive E4M3 scales, each code
// by comparison with midpoints, errors in double. The library tries only some scales, in float. If
// both choose the same byte, those scales include the best one and float is precise enough.
#include <cmath>
#include <limits>
#include <random>

#include "core/float_formats.h"
#include "core/quantize.h"
#include "formats/grid.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr size_t kBlock = 16;

struct Result {
  std::vector<uint8_t> codes, scales;  // packed; one a block
  double sum_sq_error = 0;
};

Result quantized(const std::vector<float>& x, float s, ScaleSearch search,
                 const std::vector<float>& weights) {
  Result r;
  r.codes.resize(x.size() / 2);
  r.scales.resize(x.size() / kBlock);
  QuantizeCounts counts;
  EXPECT_OK(quantize_weights(x, 1, static_cast<int64_t>(x.size()), s, search, r.codes.data(),
                             r.scales.data(), counts, nullptr, &r.sum_sq_error, weights));
  return r;
}

double error_of(const float* x, size_t byte, double s, const float* weights) {
  double sum = 0;
  for (size_t i = 0; i < kBlock; ++i) {
    const double unit = e4m3_grid().magnitudes[byte] * s, a = std::fabs(static_cast<double>(x[i]));
    const double error =
        a - (byte == 0 ? 0.0 : e2m1_grid().magnitudes[e2m1_grid().round_quotient(a, unit)] * unit);
    sum += weights == nullptr ? error * error : error * error * static_cast<double>(weights[i]);
  }
  return sum;
}

double amax_of(const float* x) {
  double amax = 0;
  for (size_t i = 0; i < kBlock; ++i) amax = std::max(amax, std::fabs(static_cast<double>(x[i])));
  return amax;
}

size_t max_scale(const float* x, double s) {
  return e4m3_grid().round_quotient(amax_of(x), 6.0 * s);
}

// All positive scales; ties go to the scale of kMax, then to the smallest. With weights, scales
// that clip and have a larger unweighted error than the scale of kMax are excluded.
size_t exhaustive(const float* x, double s, const float* weights) {
  size_t best = max_scale(x, s);
  const double of_max = error_of(x, best, s, nullptr);
  double least = error_of(x, best, s, weights);
  for (size_t byte = 1; byte < 127; ++byte) {
    const bool clips =
        amax_of(x) > 6.0 * s * e4m3_grid().magnitudes[std::min<size_t>(byte + 1, 126)];
    if (weights != nullptr && clips && error_of(x, byte, s, nullptr) > of_max) continue;
    const double error = error_of(x, byte, s, weights);
    if (error < least) best = byte, least = error;
  }
  return best;
}

size_t best_neighbour(const float* x, double s, const float* weights) {
  const double amax = amax_of(x);
  size_t best = max_scale(x, s);
  double least = error_of(x, best, s, weights);
  for (const double reach : {6.0, 4.0}) {
    size_t low = 0;
    while (low < 126 && e4m3_grid().magnitudes[low + 1] <= amax / (reach * s)) ++low;
    const size_t high =
        e4m3_grid().magnitudes[low] < amax / (reach * s) && low < 126 ? low + 1 : low;
    for (const size_t byte : {low, high}) {
      const double error = error_of(x, byte, s, weights);
      if (error < least) best = byte, least = error;
    }
  }
  return best;
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
  const Result sweep = quantized(x, s, ScaleSearch::kSweep, weights);
  for (size_t b = 0; b < x.size() / kBlock; ++b) {
    const float* block = x.data() + b * kBlock;
    const float* w = weights.empty() ? nullptr : weights.data() + b * kBlock;
    const size_t best = exhaustive(block, static_cast<double>(s), w);
    ASSERT_EQ(sweep.scales[b], best) << what << ", block " << b << ", s " << s;
    if (moved != nullptr) *moved += best != max_scale(block, static_cast<double>(s));
    const double unit = e4m3_grid().magnitudes[best] * static_cast<double>(s);
    for (size_t i = 0; i < kBlock && best != 0; ++i) {
      const uint8_t code = sweep.codes[(b * kBlock + i) / 2] >> (i % 2 * 4) & 15;
      ASSERT_EQ(code & 7u,
                e2m1_grid().round_quotient(std::fabs(static_cast<double>(block[i])), unit))
          << what;
    }
  }
}

// Tensor scales that spread blocks over all of E4M3: normal, saturated, among the smallest scales,
// and below them.
TEST(ScaleSweep, IsTheBestOfAllScales) {
  for (int kind = 0; kind < static_cast<int>(Data::kData); ++kind) {
    for (int weighted = 0; weighted < static_cast<int>(Weights::kWeights); ++weighted) {
      size_t moved = 0;
      for (uint32_t seed = 0; seed < 12; ++seed) {
        const std::vector<float> x = data(static_cast<Data>(kind), 64 * kBlock, seed + 1);
        const std::vector<float> w = weights_of(static_cast<Weights>(weighted), x, seed + 77);
        const float usual = tensor_scale_from_amax(static_cast<double>(row_amax(x)));
        const float factors[] = {1.0f,    1.0f,      1.7f,      0.3f,      0.07f,     0x1p-9f,
                                 0x1p12f, 0x1.3p15f, 0x1.7p16f, 0x1.1p17f, 0x1.9p19f, 0x1p-60f};
        expect_exhaustive(x, usual * factors[seed], w,
                          "data " + std::to_string(kind) + ", weights " + std::to_string(weighted) +
                              ", seed " + std::to_string(seed),
                          &moved);
      }
      EXPECT_GT(moved, 100u) << "data " << kind << ", weights " << weighted << ": kMax would do";
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
    const double amax = static_cast<double>(row_amax(x));
    if (amax == 0) continue;
    const double ratio = e4m3_grid().magnitudes[exhaustive(x.data(), 1.0, nullptr)] / amax;
    lowest += ratio < 1 / 6.6;
    highest += ratio > 1 / 3.9;
  }
  // The best scale may be beyond the neighbours of amax/6 and amax/4, on both sides.
  EXPECT_GT(lowest, 50u);
  EXPECT_GT(highest, 50u);
}

// Far beyond 448 the largest element is lost under any scale, and the others may want less than
// 448.
TEST(ScaleSweep, SaturatedBlocksMayWantLess) {
  std::vector<float> x(kBlock, 6.0f * 416);
  x[9] = 3600.0f;
  EXPECT_EQ(quantized(x, 1.0f, ScaleSearch::kSweep, {}).scales[0], 0x7D) << "416";
  expect_exhaustive(x, 1.0f, {}, "saturated");
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
}

TEST(ScaleSweep, BlocksWithoutErrorKeepTheScaleOfMax) {
  const std::vector<float> zeros(2 * kBlock, 0.0f), none(2 * kBlock, 0.0f);
  EXPECT_EQ(quantized(zeros, 1.0f, ScaleSearch::kSweep, {}).scales, (std::vector<uint8_t>{0, 0}));
  std::vector<float> x(kBlock, 0.0f);
  x[3] = 12.0f;  // 6 * 2 = 4 * 3 = 3 * 4 = 2 * 6
  EXPECT_EQ(quantized(x, 1.0f, ScaleSearch::kSweep, {}).scales[0], 0x40);
  x = data(Data::kNormal, kBlock, 9);  // without any weight all errors are 0
  const float s = tensor_scale_from_amax(static_cast<double>(row_amax(x)));
  EXPECT_EQ(quantized(x, s, ScaleSearch::kSweep, std::vector<float>(kBlock, 0.0f)).scales[0], 0x7E);
}

TEST(ScaleSweep, NeverLosesToTheOtherSearches) {
  for (int kind = 0; kind < static_cast<int>(Data::kData); ++kind) {
    const std::vector<float> x = data(static_cast<Data>(kind), 256 * kBlock, 31);
    const float s = tensor_scale_from_amax(static_cast<double>(row_amax(x)));
    const double sweep = quantized(x, s, ScaleSearch::kSweep, {}).sum_sq_error;
    EXPECT_LE(sweep, quantized(x, s, ScaleSearch::kMse, {}).sum_sq_error) << kind;
    EXPECT_LE(sweep, quantized(x, s, ScaleSearch::kMax, {}).sum_sq_error) << kind;
  }
}

// One weight for all channels changes nothing, for any value of it.
TEST(WeightedScales, EqualWeightsChangeNothing) {
  const std::vector<float> x = data(Data::kHeavy, 128 * kBlock, 4);
  const float s = tensor_scale_from_amax(static_cast<double>(row_amax(x)));
  for (const ScaleSearch search : {ScaleSearch::kMse, ScaleSearch::kSweep}) {
    const Result plain = quantized(x, s, search, {});
    for (const float weight : {1.0f, 0x1p-140f, 0x1p120f}) {
      const Result weighted = quantized(x, s, search, std::vector<float>(x.size(), weight));
      EXPECT_EQ(weighted.scales, plain.scales) << weight;
      EXPECT_EQ(weighted.codes, plain.codes) << weight;
      EXPECT_EQ(weighted.sum_sq_error, plain.sum_sq_error) << "the sums have no weights";
    }
  }
}

// A channel that was quiet in the data that w comes from may hold the largest element: it is not
// clipped away.
TEST(WeightedScales, KeepOutliersOfQuietChannels) {
  std::vector<float> x = data(Data::kNormal, kBlock, 12), w(kBlock, 1.0f);
  x[5] = 30.0f;
  w[5] = 0.0f;
  const float s = tensor_scale_from_amax(30.0);
  const Result weighted = quantized(x, s, ScaleSearch::kSweep, w);
  EXPECT_GE(6.0f * e4m3_to_float(weighted.scales[0]) * s, 30.0f * 0.9f);
  EXPECT_LE(error_of(x.data(), weighted.scales[0], static_cast<double>(s), w.data()),
            error_of(x.data(), max_scale(x.data(), static_cast<double>(s)), static_cast<double>(s),
                     w.data()));
}

TEST(WeightedScales, MseTakesTheBestNeighbourByWeightedError) {
  size_t moved = 0;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const std::vector<float> x = data(Data::kNormal, 64 * kBlock, seed);
    const std::vector<float> w = weights_of(Weights::kMoments, x, seed + 5);
    const float s = tensor_scale_from_amax(static_cast<double>(row_amax(x)));
    const Result mse = quantized(x, s, ScaleSearch::kMse, w);
    for (size_t b = 0; b < x.size() / kBlock; ++b) {
      const float* block = x.data() + b * kBlock;
      ASSERT_EQ(mse.scales[b], best_neighbour(block, static_cast<double>(s), w.data() + b * kBlock))
          << b;
      moved += mse.scales[b] != best_neighbour(block, static_cast<double>(s), nullptr);
    }
  }
  EXPECT_GT(moved, 100u) << "weights would not matter";
}

// Weights belong to columns: a second row has the same ones.
TEST(WeightedScales, AreOfColumns) {
  const std::vector<float> row = data(Data::kHeavy, 8 * kBlock, 6);
  const std::vector<float> w = weights_of(Weights::kMoments, row, 7);
  std::vector<float> x = row;
  x.insert(x.end(), row.begin(), row.end());
  const float s = tensor_scale_from_amax(static_cast<double>(row_amax(x)));
  std::vector<uint8_t> codes(x.size() / 2), scales(x.size() / kBlock);
  QuantizeCounts counts;
  ASSERT_OK(quantize_weights(x, 2, static_cast<int64_t>(row.size()), s, ScaleSearch::kSweep,
                             codes.data(), scales.data(), counts, nullptr, nullptr, w));
  const Result one = quantized(row, s, ScaleSearch::kSweep, w);
  for (size_t b = 0; b < one.scales.size(); ++b) {
    EXPECT_EQ(scales[b], one.scales[b]);
    EXPECT_EQ(scales[b + one.scales.size()], one.scales[b]);
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
  EXPECT_EQ(status(ScaleSearch::kMax, w).message(),
            "channel_weights: expected search mse or sweep, since max compares no errors, got max");
  EXPECT_EQ(status(ScaleSearch::kSweep, std::vector<float>(kBlock + 1, 1.0f)).message(),
            "channel_weights: expected one for each of 16 columns, got 17");
  for (const float wrong :
       {-1.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    w[7] = wrong;
    const Status refused = status(ScaleSearch::kMse, w);
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_EQ(refused.message(), "channel_weights: expected finite numbers of at least 0, got " +
                                     std::to_string(wrong) + " for column 7");
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
