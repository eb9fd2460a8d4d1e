// Activations of one pair of gate and up against long double: within 4 ulps if the result is a
// normal number, and gelu, gelu_tanh and situ within 0.5001.
#include "core/activation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

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

// The formulas of numerics.md in the order in which nothing cancels.
long double exact(const GatedActivation& f, long double g, long double u) {
  const long double twice_c = std::sqrt(8 / std::acos(-1.0L)), b = f.gate_limit, l = f.up_limit;
  switch (f.function) {
    case Activation::kGelu: return g * std::erfc(-g / std::sqrt(2.0L)) / 2 * u;
    case Activation::kGeluTanh: return g * sigmoid(twice_c * (g + 0.044715L * g * g * g)) * u;
    default: return b * std::tanh(g / b) * sigmoid(g) * l * std::tanh(u / l);
  }
}

double ulps(float h, long double exact) {
  if (std::abs(exact) >= 0x1.ffffffp127L) return std::isinf(h) ? 0 : HUGE_VAL;
  const int exponent = exact == 0 ? -149 : std::max(std::ilogb(exact) - 23, -149);
  return static_cast<double>(std::abs(std::ldexp(h - exact, -exponent)));
}

// Every sign and exponent of the gate, with 2^12 significands spread over each.
TEST(GatedActivation, GeluAndSituAreWithinHalfAnUlpOverAllFloats) {
  const GatedActivation functions[] = {
      {.function = Activation::kGelu},
      {.function = Activation::kGeluTanh},
      {.function = Activation::kSitu, .gate_limit = 4, .up_limit = 25},
      {.function = Activation::kSitu, .gate_limit = 0.3f, .up_limit = 1e30f}};
  const float ups[] = {1.0f, -0.3f, 5e30f, -3e38f, 1e-20f, 40.0f, 3e-42f};
  for (const GatedActivation& f : functions) {
    double worst = 0;
    float worst_gate = 0;
    for (uint64_t i = 0; i < (uint64_t{1} << 21); ++i) {
      const float g = std::bit_cast<float>(static_cast<uint32_t>(i * 2048 + i % 2039)),
                  u = ups[i % std::size(ups)];
      if (!std::isfinite(g)) continue;
      const double off = ulps(f(g, u), exact(f, g, u));
      if (!(off <= worst)) worst = off, worst_gate = g;
    }
    EXPECT_LE(worst, 0.5001) << static_cast<int>(f.function) << " at " << worst_gate;
  }
}

TEST(GatedActivation, GeluAndSituKeepNanAndInfinity) {
  const float inf = HUGE_VALF, nan = std::nanf("");
  for (const Activation function : {Activation::kGelu, Activation::kGeluTanh}) {
    const GatedActivation f{.function = function};
    EXPECT_TRUE(std::isnan(f(nan, 1.0f)) && std::isnan(f(1.0f, nan)));
    EXPECT_TRUE(std::isnan(f(-inf, 1.0f)));  // -Inf times 0
    EXPECT_EQ(f(inf, 1.0f), inf);
    EXPECT_EQ(f(-15.0f, inf), -inf);
    EXPECT_EQ(f(-3e38f, 1.0f), 0.0f);
  }
  const GatedActivation f{.function = Activation::kSitu, .gate_limit = 4, .up_limit = 25};
  EXPECT_TRUE(std::isnan(f(nan, 1.0f)) && std::isnan(f(1.0f, nan)));
  EXPECT_EQ(f(-inf, 1.0f), 0.0f);
  EXPECT_EQ(f(inf, inf), 100.0f);
  EXPECT_EQ(f(inf, -inf), -100.0f);
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
