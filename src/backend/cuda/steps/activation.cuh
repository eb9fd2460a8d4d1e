// The gated activation functions of the contract in fp32; NaN stays NaN (core/activation.h is the same on a host).
#pragma once

#include "core/config.h"

namespace nvfp4_moe::cuda {

struct GatedActivation {
  Activation function;
  float limit;  // L; unused by kSwiglu
  float alpha;  // a of kSwigluOai

  __device__ static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
  __device__ static float at_most(float x, float most) { return x > most ? most : x; }
  __device__ static float within(float x, float most) { return x < -most ? -most : at_most(x, most); }

  __device__ float operator()(float g, float u) const {
    switch (function) {
      case Activation::kSwiglu: return g * sigmoid(g) * u;
      case Activation::kSwigluClamped: {
        const float clamped = at_most(g, limit);
        return clamped * sigmoid(clamped) * within(u, limit);
      }
      case Activation::kSwigluStep: return at_most(g * sigmoid(g), limit) * within(u, limit);
      case Activation::kSwigluOai: {
        const float clamped = at_most(g, limit);
        return clamped * sigmoid(alpha * clamped) * (within(u, limit) + 1.0f);
      }
    }
    return 0.0f;
  }
};

}  // namespace nvfp4_moe::cuda
