// Activations of one pair of gate and up against long double: within 4 ulps if the result is a
// normal number.
#include "core/activation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace nvfp4_moe::internal::test {
namespace {

long double sigmoid(long double x) { return 1 / (1 + std::exp(-x)); }

TEST(GatedActivation, IsWithinFourUlpsDownToTheLastGate) {
  for (float g = 100; g > -200; g -= 0.0371f) {
    for (const float u : {1.0f, -0.3f, 5e30f, -3e38f}) {
      const long double exact = sigmoid(g) * g * u;
      if (std::abs(exact) > 0x1p127L) continue;
      const float h = GatedActivation{}(g, u);
      EXPECT_LE(std::abs(h - exact), std::max(std::abs(exact), 0x1p-126L) * 0x1p-22L)
          << g << " " << u;
    }
  }
  // a is the fp32 number: 1.702 as a double would be 6 ulps away at g = -50. a g is rounded: half
  // an ulp of it is that much of e^(a g).
  const GatedActivation oai{Activation::kSwigluOai, 7.0f, 1.702f};
  for (const float g : {-50.0f, -3.0f, 0.5f, 6.0f}) {
    const long double slope = 1.702f, exact = g * sigmoid(slope * g) * 3;
    const long double bound = (4 + std::abs(slope * g)) * 0x1p-24L * std::abs(exact) * 2;
    EXPECT_LE(std::abs(oai(g, 2.0f) - exact), bound) << g;
  }
}

TEST(GatedActivation, KeepsNanAndInfinity) {
  const float inf = HUGE_VALF;
  EXPECT_TRUE(std::isnan(GatedActivation{}(std::nanf(""), 1.0f)));
  EXPECT_TRUE(std::isnan(GatedActivation{}(-inf, 1.0f)));  // -Inf times 0
  EXPECT_EQ(GatedActivation{}(inf, 1.0f), inf);
  EXPECT_EQ(GatedActivation{}(-100.0f, inf), -inf);  // silu(-100) is -3.7e-42
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
