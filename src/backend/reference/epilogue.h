// Converts an accumulator to a rounded GEMM element, by activation format. The formats differ only
// here and in the dots; the steps are written once for all.
//
//   nvfp4       int64     exact; alpha = row scale * tensor scale
//   int8_block  WideSum   exact; alpha = tensor scale
//   fp8         Fp8Sum    exact; alpha = row scale * tensor scale * 2^shift
//   bf16        double    added in increasing k; times the tensor scale
#pragma once

#include "backend/layer_steps.h"
#include "backend/reference/dots.h"
#include "backend/reference/exact.h"
#include "backend/reference/matrix.h"
#include "backend/reference/wide_sum.h"

namespace nvfp4_moe::internal::reference {

inline double epilogue(const ActivationBuffers& activations, int64_t row, int64_t dot,
                       const Matrix& weight, const FloatFormat& format) {
  return scale_exact(dot, alpha_of(activations.row_scale[row], weight.tensor_scale), format);
}
inline double epilogue(const ActivationBuffers&, int64_t, const WideSum& dot, const Matrix& weight,
                       const FloatFormat& format) {
  return scale_exact(dot, weight.tensor_scale, format);
}
inline double epilogue(const ActivationBuffers& activations, int64_t row, const Fp8Sum& dot,
                       const Matrix& weight, const FloatFormat& format) {
  const float alpha = alpha_of(activations.row_scale[row], weight.tensor_scale, weight.fp8_shift);
  return scale_exact(dot.value, alpha, format, kFp8AccumulatorExponent);
}
inline double epilogue(const ActivationBuffers&, int64_t, double dot, const Matrix& weight,
                       const FloatFormat& format) {
  return round_to(format, dot * weight.tensor_scale);
}

// fl32(value + bias[n]) for an fp32 value; the value itself if there are no biases.
inline double add_bias(double value, const float* bias, int64_t n) {
  return bias == nullptr ? value : static_cast<double>(static_cast<float>(value) + bias[n]);
}

// Calls body.template operator()<Accumulator>() with the format's accumulator.
template <class Body>
void with_accumulator(ActivationFormat format, Body&& body) {
  switch (format) {
    case ActivationFormat::kNvfp4: return body.template operator()<int64_t>();
    case ActivationFormat::kBf16: return body.template operator()<double>();
    case ActivationFormat::kInt8Block: return body.template operator()<WideSum>();
    case ActivationFormat::kFp8: return body.template operator()<Fp8Sum>();
  }
}

}  // namespace nvfp4_moe::internal::reference
