// A router's scores against long double, within the bounds that docs/explanation/numerics.md
// derives; and the order of keys.
#include "core/router_score.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace nvfp4_moe::internal::router {
namespace {

constexpr float kHuge = std::numeric_limits<float>::infinity();

// Floats of all magnitudes that matter to e^x, and those next to the points at which a formula
// changes.
std::vector<float> logits() {
  std::vector<float> x = {0.0f,  -0.0f,   1e-45f,  -1e-45f, 1e-20f, 88.7f,
                          89.1f, -103.9f, -104.1f, -207.9f, 3e38f,  -3e38f};
  for (const float at : {-20.0f, 0.0f, 20.0f}) {
    x.push_back(std::nextafter(at, -kHuge));
    x.push_back(std::nextafter(at, kHuge));
  }
  std::mt19937 random(1);
  std::uniform_real_distribution<float> wide(-210, 210), narrow(-4, 4);
  for (int i = 0; i < 20000; ++i) {
    x.push_back(wide(random));
    x.push_back(narrow(random));
  }
  return x;
}

long double exact(Scoring scoring, float x) {
  const long double wide = x;
  if (scoring == Scoring::kSigmoid) return 1.0L / (1.0L + std::exp(-wide));
  return std::sqrt(wide > 0 ? wide + std::log1p(std::exp(-wide)) : std::log1p(std::exp(wide)));
}

TEST(RouterScore, LiesWithinItsBound) {
  constexpr long double kUnit = 0x1p-24L, kLeast = 0x1p-149L;
  for (const float x : logits()) {
    for (const auto& [scoring, units] :
         {std::pair{Scoring::kSigmoid, 3.01L}, {Scoring::kSqrtSoftplus, 1.51L}}) {
      const long double expected = exact(scoring, x);
      EXPECT_LE(std::abs(score_of(scoring, x, 0.0f) - expected), units * kUnit * expected + kLeast)
          << to_string(scoring) << " of " << x;
    }
    if (x > 0) continue;
    const long double expected = std::exp(static_cast<long double>(x) - 2.5L);
    EXPECT_LE(std::abs(score_of(Scoring::kSoftmax, x, 2.5f) - expected),
              (1.01L + std::abs(static_cast<long double>(x) - 2.5L)) * kUnit * expected + kLeast)
        << "softmax of " << x;
  }
}

TEST(RouterScore, KeysOrderAsNumbersDo) {
  std::vector<float> x = logits();
  x.push_back(kHuge);
  x.push_back(-kHuge);
  std::sort(x.begin(), x.end());
  for (size_t i = 1; i < x.size(); ++i) {
    EXPECT_EQ(x[i - 1] < x[i], key_of(x[i - 1]) < key_of(x[i])) << x[i - 1] << ", " << x[i];
    EXPECT_EQ(value_of(key_of(x[i])), x[i]);
  }
  EXPECT_EQ(key_of(-0.0f), key_of(0.0f));
  EXPECT_LT(kRemovedKey, kNanKey);
  EXPECT_LT(kNanKey, key_of(-kHuge));
  for (const float nan : {std::nanf(""), -std::nanf("")}) EXPECT_EQ(key_of(nan), kNanKey);
  EXPECT_TRUE(std::isnan(value_of(kNanKey)));
}

}  // namespace
}  // namespace nvfp4_moe::internal::router
