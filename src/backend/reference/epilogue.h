// From an accumulator to a rounded GEMM element, by activation format. What differs between the formats is here and in
// the dots; the steps are written once for all three.
//
//   nvfp4       int64     exact; alpha = row scale * tensor scale
//   int8_block  WideSum   exact; alpha = tensor scale
//   bf16        double    added in increasing k; times the tensor scale
#pragma once

#include "backend/layer_steps.h"
#include "backend/reference/exact.h"
#include "backend/reference/wide_sum.h"

namespace nvfp4_moe::reference {

inline double epilogue(const ActivationBuffers& activations, int64_t row, int64_t dot, float tensor_scale,
                       const FloatFormat& format) {
  return scale_exact(dot, alpha_of(activations.row_scale[row], tensor_scale), format);
}
inline double epilogue(const ActivationBuffers&, int64_t, const WideSum& dot, float tensor_scale,
                       const FloatFormat& format) {
  return scale_exact(dot, tensor_scale, format);
}
inline double epilogue(const ActivationBuffers&, int64_t, double dot, float tensor_scale, const FloatFormat& format) {
  return round_to(format, dot * tensor_scale);
}

// body.template operator()<Accumulator>() with the format's accumulator.
template <class Body>
void with_accumulator(ActivationFormat format, Body&& body) {
  switch (format) {
    case ActivationFormat::kNvfp4: return body.template operator()<int64_t>();
    case ActivationFormat::kBf16: return body.template operator()<double>();
    case ActivationFormat::kInt8Block: return body.template operator()<WideSum>();
  }
}

}  // namespace nvfp4_moe::reference
