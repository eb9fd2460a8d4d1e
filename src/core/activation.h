// The activation functions of the contract (docs/explanation/numerics.md) on one pair of gemm1's
// outputs, and the pass that applies a gated one to a row and quantizes the result.
//
// The functions of swiglu are fp32 with one e^x (core/exp.h), so that hosts and devices give the
// same bits. NaN stays NaN. The far tail of the sigmoid is computed in double, since 1 + e^-x
// overflows fp32 there. This is plain code for one element. Backends that vectorize it are compared
// with it. A backend whose error bound allows a faster e^x passes its own.
//
// kGelu, kGeluTanh and kSitu are computed in double and rounded once (core/gelu_situ.h). They have
// functions of their own here, so that a kernel of the others need not contain them.
#pragma once

#include <cstdint>
#include <optional>

#include "core/config.h"
#include "core/dtype.h"
#include "core/exp.h"
#include "core/gelu_situ.h"
#include "core/host_device.h"
#include "core/quantize.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

struct GatedActivation {
  Activation function = Activation::kSwiglu;
  float limit = 0.0f;       // L of kSwigluClamped, kSwigluStep and kSwigluOai
  float alpha = 1.702f;     // a of kSwigluOai
  float gate_limit = 0.0f;  // b of kSitu
  float up_limit = 0.0f;    // l of kSitu

  // Reads the activation and its numbers, not the sizes. kInvalidArgument as in MoeConfig::make, or
  // if the function has no gate.
  static Result<GatedActivation> make(MoeOptions options);
  static GatedActivation of(const MoeOptions& options) {
    return {options.activation, options.swiglu_limit.value_or(0.0f), options.swiglu_alpha,
            options.situ_gate_limit.value_or(0.0f), options.situ_up_limit.value_or(0.0f)};
  }
  NVFP4_MOE_HOST_DEVICE float operator()(float gate, float up) const {
    return is_gelu_or_situ(function) ? gelu_or_situ(gate, up) : swiglu_or_relu2(gate, up);
  }
  // Precondition: !is_gelu_or_situ(function). kRelu2 does not read gate.
  NVFP4_MOE_HOST_DEVICE float swiglu_or_relu2(float gate, float up) const;
  // Precondition: is_gelu_or_situ(function). Within 0.5001 ulp of the real number.
  NVFP4_MOE_HOST_DEVICE float gelu_or_situ(float gate, float up) const;
  // swiglu_or_relu2 with the caller's e^x of a float. Let x be the argument of the sigmoid: once
  // e^-x is infinite, the result is -0 or 0.
  template <class Exp>
  NVFP4_MOE_HOST_DEVICE float apply(float gate, float up, const Exp& exp) const;
  // swiglu_or_relu2 if the argument of the sigmoid is below kSigmoidTail, within half an ulp. The
  // function has a gate.
  NVFP4_MOE_HOST_DEVICE float tail(float gate, float up) const;
};
// Below this, sigmoid(x) is e^x to 2^-92, and the gate is below every clamp.
inline constexpr float kSigmoidTail = -64.0f;

namespace activation_detail {
// Clamps x from above, or from both sides. NaN stays NaN.
NVFP4_MOE_HOST_DEVICE inline float at_most(float x, float limit) { return x > limit ? limit : x; }
NVFP4_MOE_HOST_DEVICE inline float within(float x, float limit) {
  return x < -limit ? -limit : at_most(x, limit);
}
// NaN stays NaN. The result is never -0, so h is never -0.
NVFP4_MOE_HOST_DEVICE inline float relu2(float x) {
  const float positive = x <= 0.0f ? 0.0f : x;
  return positive * positive;
}
}  // namespace activation_detail

template <class Exp>
NVFP4_MOE_HOST_DEVICE float GatedActivation::apply(float g, float u, const Exp& exp) const {
  using namespace activation_detail;
  const auto sigmoid = [&exp](float x) { return 1.0f / (1.0f + exp(-x)); };
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
    case Activation::kRelu2: return relu2(u);
    case Activation::kGelu:
    case Activation::kGeluTanh:
    case Activation::kSitu: break;  // see gelu_or_situ
  }
  return 0.0f;
}

// e^x with the same bits on every host and device, as a function object, since device code cannot
// take the address of a function.
struct ExpSameEverywhere {
  NVFP4_MOE_HOST_DEVICE float operator()(float x) const { return exp_same_everywhere(x); }
};
NVFP4_MOE_HOST_DEVICE inline float GatedActivation::swiglu_or_relu2(float g, float u) const {
  const float x = function == Activation::kSwigluOai ? alpha * g : g;
  return x < kSigmoidTail && function != Activation::kRelu2 ? tail(g, u)
                                                            : apply(g, u, ExpSameEverywhere());
}
NVFP4_MOE_HOST_DEVICE inline float GatedActivation::tail(float g, float u) const {
  using namespace activation_detail;
  const double gate = static_cast<double>(g);
  const double x = function == Activation::kSwigluOai ? static_cast<double>(alpha) * gate : gate;
  const float factor = function == Activation::kSwiglu      ? u
                       : function == Activation::kSwigluOai ? within(u, limit) + 1.0f
                                                            : within(u, limit);
  return static_cast<float>(gate * (x < -708.0 ? 0.0 : exp_unrounded(x)) *
                            static_cast<double>(factor));
}

NVFP4_MOE_HOST_DEVICE inline float GatedActivation::gelu_or_situ(float g, float u) const {
  switch (function) {
    case Activation::kGelu: return gelu(g, u);
    case Activation::kGeluTanh: return gelu_tanh(g, u);
    default: return situ(g, u, gate_limit, up_limit);
  }
}

// gemm1's output: row r holds `inner` gate and `inner` up values, of an activation dtype.
struct GateUp {
  const void* data = nullptr;  // (rows, 2 inner)
  DType dtype = DType::kBf16;
  int64_t rows = 0;
  int64_t inner = 0;         // multiple of 16
  bool interleaved = false;  // g0 u0 g1 u1 ...; else all of gate, then all of up
};

// Output of swiglu_quantize, as gemm2 multiplies it.
struct QuantizedRows {
  uint8_t* codes = nullptr;         // (rows, inner/2)
  uint8_t* block_scales = nullptr;  // (rows, inner/16)
  // (rows); NaN, with zero codes and block scales, if h holds NaN or Inf
  float* row_scales = nullptr;
};

// Computes h = bf16(activation(gate, up) * row_weight), rounded once, and quantizes it. The tensor
// scale of every row is power_of_two, or the row's own (dynamic_token_scale) if that is 0.
// row_weights: (rows) router weights under before_down, or null. Precondition: power_of_two is 0 or
// is_power_of_two.
void swiglu_quantize(const GatedActivation& activation, const GateUp& input,
                     const float* row_weights, float power_of_two, const QuantizedRows& out,
                     QuantizeCounts& counts);

}  // namespace nvfp4_moe::internal
