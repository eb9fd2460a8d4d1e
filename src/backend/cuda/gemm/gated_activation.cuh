// The activation functions in gemm1's epilogue: one formula for the functions of swiglu, another
// for gelu, gelu_tanh and situ, and relu2. gemm1's kernels are compiled for each of the three.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "backend/cuda/ptx/arithmetic.cuh"
#include "core/config.h"

namespace nvfp4_moe::internal::cuda {

// The function that a kernel of gemm1 contains.
enum class Gemm1Function : uint8_t { kSwiglu, kGeluOrSitu, kRelu2 };
inline Gemm1Function gemm1_function(Activation activation) {
  if (!has_gate(activation)) return Gemm1Function::kRelu2;
  return is_gelu_or_situ(activation) ? Gemm1Function::kGeluOrSitu : Gemm1Function::kSwiglu;
}
// Calls launch<function>().
template <class Launch>
auto with_gemm1_function(Gemm1Function function, const Launch& launch) {
  switch (function) {
    case Gemm1Function::kSwiglu: break;
    case Gemm1Function::kGeluOrSitu:
      return launch.template operator()<Gemm1Function::kGeluOrSitu>();
    case Gemm1Function::kRelu2: return launch.template operator()<Gemm1Function::kRelu2>();
  }
  return launch.template operator()<Gemm1Function::kSwiglu>();
}

// Every function of swiglu without a branch: h = at_most(g' sigmoid(a g'), product_limit)
// (within(u, up_limit) + up_offset), g' = at_most(g, gate_limit). Limits that a function does not
// have are infinite. NaN stays NaN.
struct GatedActivation {
  float gate_limit, exponent, product_limit, up_limit, up_offset;  // e^(-a g') = 2^(exponent g')
  bool plain;                                                      // no limits

  static GatedActivation from(const MoeConfig& config) {
    constexpr float kNone = std::numeric_limits<float>::infinity();
    constexpr float kLog2E = 1.44269504f;
    const float limit = config->swiglu_limit.value_or(kNone);
    switch (config->activation) {
      case Activation::kSwiglu: break;
      case Activation::kGelu:
      case Activation::kGeluTanh:
      case Activation::kSitu: break;   // GeluOrSitu below
      case Activation::kRelu2: break;  // relu2() below
      case Activation::kSwigluClamped: return {limit, -kLog2E, kNone, limit, 0, false};
      case Activation::kSwigluStep: return {kNone, -kLog2E, limit, limit, 0, false};
      case Activation::kSwigluOai:
        return {limit, -kLog2E * config->swiglu_alpha, kNone, limit, 1, false};
    }
    return {kNone, -kLog2E, kNone, kNone, 0, true};
  }
  __device__ static float at_most(float x, float most) { return ptx::min_nan(x, most); }
  __device__ static float within(float x, float most) {
    return ptx::max_nan(at_most(x, most), -most);
  }
  // kPlain: no limits; same bits. Rounding exponent * gate changes g by half an ulp, which is far
  // below g's own error bound.
  template <bool kPlain>
  __device__ float gated(float g, float u) const {
    const float gate = kPlain ? g : at_most(g, gate_limit);
    const float product = gate * ptx::rcp_approx(1.0f + ptx::ex2_approx(exponent * gate));
    return kPlain ? product * (u + up_offset)
                  : at_most(product, product_limit) * (within(u, up_limit) + up_offset);
  }
};

// gelu, gelu_tanh and situ: h = cap(g) sigmoid(q(g)) cap(u). q(x) = x P(x^2) is x for situ and
// cubic for gelu_tanh. For gelu it is log(Phi(x) / Phi(-x)), so that x sigmoid(q(x)) = x Phi(x).
// Nothing cancels for negative g. cap(x) = limit tanh(x / limit) for situ, otherwise x. NaN stays
// NaN. docs/explanation/numerics.md, section 7, has the errors.
struct GeluOrSitu {
  float most_gate, per_gate_limit, most_up, per_up_limit;  // of situ: 9 b, 1 / b, 9 l, 1 / l
  bool capped;                                             // situ
  bool by_erf;                                             // gelu

  static GeluOrSitu from(const MoeConfig& config) {
    constexpr float kMost = std::numeric_limits<float>::max();
    GeluOrSitu function{};
    function.capped = config->activation == Activation::kSitu;
    function.by_erf = config->activation == Activation::kGelu;
    if (function.capped) {
      function.most_gate = kMostOfTanh * *config->situ_gate_limit;
      function.per_gate_limit = std::min(1.0f / *config->situ_gate_limit, kMost);
      function.most_up = kMostOfTanh * *config->situ_up_limit;
      function.per_up_limit = std::min(1.0f / *config->situ_up_limit, kMost);
    }
    return function;
  }
  // kPlain: not situ, known at compile time.
  template <bool kPlain>
  __device__ float gated(float g, float u) const {
    float gate = g, up = u, per_g = -1.44269504f;  // e^-q = 2^(per_g g)
    if (kPlain || !capped) {
      per_g = by_erf ? exponent_of_gelu(g * g) : fmaf(g * g, -0.102943240f, -2.30220820f);
    } else {
      gate = cap(g, most_gate, per_gate_limit);
      up = cap(u, most_up, per_up_limit);
    }
    return gate * ptx::rcp_approx(1.0f + ptx::ex2_approx(per_g * g)) * up;
  }

 private:
  static constexpr float kMostOfTanh = 9.0f;  // tanh(9) rounds to 1

  // sum * x + each of the coefficients
  template <class... Floats>
  __device__ static float horner(float x, float sum, Floats... coefficients) {
    ((sum = fmaf(sum, x, coefficients)), ...);
    return sum;
  }
  // -log2(e) P(square) of gelu. Fitted for |g| up to 5.5. Beyond that P is constant, and the error
  // is below 2^-27 |g|.
  __device__ static float exponent_of_gelu(float square) {
    return horner(ptx::min_nan(square, 30.25f), 9.21092426e-15f, -1.22446226e-12f, 6.73948744e-11f,
                  -1.90118432e-09f, 2.39318645e-08f, 1.44661669e-07f, -1.04914852e-05f,
                  1.58343042e-04f, 9.21464962e-05f, -1.04830116e-01f, -2.30221128f);
  }
  // limit tanh(x / limit): x times a rational function of (x / limit)^2 within 2^-25.5 of tanh(y) /
  // y for |y| up to 9. Its coefficients are positive, so that nothing cancels near 0 either.
  __device__ static float cap(float x, float most, float per_limit) {
    const float within = ptx::max_nan(ptx::min_nan(x, most), -most);
    const float y = within * per_limit, square = y * y;
    const float numerator =
        horner(square, 1.33540539e-08f, 2.06086332e-05f, 3.49556096e-03f, 1.33810028e-01f, 1.0f);
    const float denominator =
        horner(square, 7.77630646e-07f, 3.28559021e-04f, 2.58768797e-02f, 4.67143178e-01f, 1.0f);
    return within * numerator * ptx::rcp_approx(denominator);
  }
};

// relu(u)^2, for layers without a gate. NaN stays NaN, and no result is -0.
__device__ inline float relu2(float u) {
  const float positive = ptx::max_nan(u, 0.0f);
  return positive * positive;
}

}  // namespace nvfp4_moe::internal::cuda
