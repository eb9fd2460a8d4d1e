// The activation functions kGelu, kGeluTanh and kSitu of one pair of gate and up, with the same
// bits on every host and device.
//
// All arithmetic is in double, in this order, and no compiler of this library contracts it. Each
// result is rounded once to float and is within 0.5001 ulp of the real number for all finite
// inputs, tails and subnormal numbers included (tests/core/activation_test.cpp). NaN stays NaN.
// gelu and gelu_tanh of -Inf are NaN (-Inf times 0), like silu. situ of -Inf and Inf is finite.
#pragma once

#include "core/exp.h"
#include "core/host_device.h"

namespace nvfp4_moe::internal {

namespace gelu_situ_detail {

// 1 / (1 + e^-x), x not NaN. Below -708, e^x times any two floats rounds to 0.
NVFP4_MOE_HOST_DEVICE inline double sigmoid(double x) {
  return x < -708.0 ? 0.0 : 1.0 / (1.0 + exp_unrounded(x > 708.0 ? -708.0 : -x));
}

// tanh x, x not NaN, within 2^-43 of itself also near 0: Taylor's series to x^11 there.
NVFP4_MOE_HOST_DEVICE inline double tanh(double x) {
  const double magnitude = x < 0.0 ? -x : x;
  if (magnitude < 0.125) {
    const double square = x * x;
    double sum = square * (-1382.0 / 155925.0) + 62.0 / 2835.0;
    sum = sum * square - 17.0 / 315.0;
    sum = sum * square + 2.0 / 15.0;
    sum = sum * square - 1.0 / 3.0;
    return x + x * (square * sum);
  }
  const double power = exp_unrounded(magnitude > 354.0 ? -708.0 : -2.0 * magnitude);
  const double result = (1.0 - power) / (1.0 + power);
  return x < 0.0 ? -result : result;
}

// Coefficients of normal_tail's polynomial, the highest first. Called with constants.
inline constexpr int kNormalTailTerms = 18;
NVFP4_MOE_HOST_DEVICE constexpr double normal_tail_coefficient(int i) {
  constexpr double kCoefficients[kNormalTailTerms] = {
      0x1.5265a66367696p-24, 0x1.da09b5b856373p-25,  -0x1.c32d427491c7p-21, -0x1.3268ab5474475p-23,
      0x1.ae8357cbd481p-18,  -0x1.86833fabf7aacp-18, -0x1.4f0042ad78b5p-15, 0x1.fe511c8d203c5p-14,
      0x1.4a8adbb80b31cp-15, -0x1.3b2477c71bca3p-10, 0x1.199831635ba5dp-8,  -0x1.2b2bb8f33efebp-7,
      0x1.9b36b7007af9fp-7,  -0x1.00cd0d904132ap-7,  -0x1.a0c86cca9aa5fp-7, 0x1.ac5c08df12cdbp-5,
      -0x1.ac262e751debep-4, 0x1.7622b016acda3p-2};
  return kCoefficients[i];
}

// The upper tail of the normal distribution, erfc(a / sqrt(2)) / 2, for a >= 0, within 2^-43 of
// itself up to a = 37.6. Beyond it, it counts as 0: times any two floats it rounds to that.
//
// e^(a^2 / 2) (1 + 3/4 a) times the tail is smooth in t = (a - 5) / (a + 5). The polynomial
// interpolates it at the 18 Chebyshev nodes of the interval that t has for a in [0, 37.6].
NVFP4_MOE_HOST_DEVICE inline double normal_tail(double a) {
  if (a > 37.6) return 0.0;
  const double t = (a - 5.0) / (a + 5.0);
  double sum = normal_tail_coefficient(0);
  for (int i = 1; i < kNormalTailTerms; ++i) sum = sum * t + normal_tail_coefficient(i);
  return exp_unrounded(-0.5 * (a * a)) * sum / (1.0 + 0.75 * a);
}

}  // namespace gelu_situ_detail

// g Phi(g) u, Phi the normal distribution. For negative g it is the tail, so nothing cancels.
NVFP4_MOE_HOST_DEVICE inline float gelu(float gate, float up) {
  if (gate != gate) return gate;
  const double g = static_cast<double>(gate), u = static_cast<double>(up);
  const double tail = gelu_situ_detail::normal_tail(g < 0.0 ? -g : g);
  return static_cast<float>(g * (g < 0.0 ? tail : 1.0 - tail) * u);
}

// g (1 + tanh(c (g + 0.044715 g^3))) / 2 u, c = sqrt(2 / pi). (1 + tanh(y)) / 2 = sigmoid(2 y), in
// which nothing cancels.
NVFP4_MOE_HOST_DEVICE inline float gelu_tanh(float gate, float up) {
  if (gate != gate) return gate;
  constexpr double kTwiceC = 0x1.9884533d43651p+0;
  const double g = static_cast<double>(gate), u = static_cast<double>(up);
  return static_cast<float>(g * gelu_situ_detail::sigmoid(kTwiceC * (g + 0.044715 * (g * g * g))) *
                            u);
}

// b tanh(g / b) sigmoid(g) l tanh(u / l), b and l positive and finite.
NVFP4_MOE_HOST_DEVICE inline float situ(float gate, float up, float b, float l) {
  using namespace gelu_situ_detail;
  if (gate != gate || up != up) return gate + up;
  const double g = static_cast<double>(gate), u = static_cast<double>(up);
  const double gate_cap = static_cast<double>(b), up_cap = static_cast<double>(l);
  return static_cast<float>(gate_cap * gelu_situ_detail::tanh(g / gate_cap) * sigmoid(g) *
                            (up_cap * gelu_situ_detail::tanh(u / up_cap)));
}

}  // namespace nvfp4_moe::internal
