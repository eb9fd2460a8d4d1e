// Argument reading shared by the C interface's format functions on the host and on a device: C
// values become requests of moe/formats.h, which checks them.
#pragma once

#include <cstdint>
#include <optional>

#include "c_api/common.h"
#include "moe/formats.h"

namespace nvfp4_moe::internal::c_api {

// 0 means no value.
inline std::optional<float> unless_zero(float value) {
  return value == 0.0f ? std::nullopt : std::optional<float>(value);
}

// Combines nvfp4_moe_swiglu and the arrays of a call.
inline Result<formats::SwigluQuantize> read_swiglu(const nvfp4_moe_swiglu* options,
                                                   const void* gate_up, int64_t rows, int64_t inner,
                                                   const float* row_weights,
                                                   const QuantizedRows& out) {
  NVFP4_MOE_ASSIGN(const nvfp4_moe_swiglu o, read_struct("options", options));
  formats::SwigluQuantize call;
  NVFP4_MOE_ASSIGN(call.activation, read_enum("activation", o.activation, Activation::kSitu));
  call.swiglu_limit = unless_zero(o.swiglu_limit);
  call.swiglu_alpha = unless_zero(o.swiglu_alpha).value_or(call.swiglu_alpha);
  call.situ_gate_limit = unless_zero(o.situ_gate_limit);
  call.situ_up_limit = unless_zero(o.situ_up_limit);
  if (o.interleaved != 0 && o.interleaved != 1)
    return invalid_argument("interleaved: expected 0 or 1, got " + std::to_string(o.interleaved));
  call.interleaved = o.interleaved == 1;
  call.power_of_two = unless_zero(o.power_of_two);
  NVFP4_MOE_ASSIGN(call.dtype, read_dtype("dtype", o.dtype, DType::kBf16));
  call.gate_up = gate_up;
  call.rows = rows;
  call.inner = inner;
  call.row_weights = row_weights;
  call.out = out;
  return call;
}

}  // namespace nvfp4_moe::internal::c_api
