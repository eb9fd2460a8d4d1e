// The activation functions in gemm1's epilogue: one formula for all functions with a gate.
#pragma once

#include <cuda_runtime.h>

#include <limits>

#include "backend/cuda/ptx/arithmetic.cuh"
#include "core/config.h"

namespace nvfp4_moe::internal::cuda {

// Every gated activation without a branch: h = at_most(g' sigmoid(a g'), product_limit) (within(u,
// up_limit) + up_offset), g' = at_most(g, gate_limit). Limits that a function does not have are
// infinite. NaN stays NaN.
struct GatedActivation {
  float gate_limit, exponent, product_limit, up_limit, up_offset;  // e^(-a g') = 2^(exponent g')
  bool plain;                                                      // no limits

  static GatedActivation from(const MoeConfig& config) {
    constexpr float kNone = std::numeric_limits<float>::infinity();
    constexpr float kLog2E = 1.44269504f;
    const float limit = config->swiglu_limit.value_or(kNone);
    switch (config->activation) {
      case Activation::kSwiglu: break;
      case Activation::kRelu2: break;  // relu2() below
      case Activation::kGelu:
      case Activation::kGeluTanh:
      case Activation::kSitu: break;  // declined by supports_config
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

// relu(u)^2, for layers without a gate. NaN stays NaN, and no result is -0.
__device__ inline float relu2(float u) {
  const float positive = ptx::max_nan(u, 0.0f);
  return positive * positive;
}

}  // namespace nvfp4_moe::internal::cuda
