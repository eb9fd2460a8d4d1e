// What the C interface's format functions check alike, wherever their arrays lie.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "c_api/common.h"
#include "core/activation.h"
#include "core/config.h"
#include "core/dtype.h"
#include "core/float_formats.h"
#include "moe/batch_check.h"

namespace nvfp4_moe::c_api {

// Keeps every product of two sides, and their bytes, far inside int64.
inline constexpr int64_t kMaxSide = int64_t{1} << 30;

inline Status check_matrix_size(int64_t rows, int64_t cols) {
  if (rows >= 0 && rows <= kMaxSide && cols >= 0 && cols <= kMaxSide && cols % 16 == 0) return {};
  return invalid_argument("(rows, cols): expected 0 to 2^30 each, cols a multiple of 16, got (" + std::to_string(rows) +
                          ", " + std::to_string(cols) + ")");
}

inline bool is_scale_size(int64_t rows, int64_t scale_cols) {
  return rows >= 0 && rows <= kMaxSide && scale_cols >= 0 && scale_cols <= kMaxSide;
}
inline Status check_scale_size(int64_t rows, int64_t scale_cols) {
  if (is_scale_size(rows, scale_cols)) return {};
  return invalid_argument("(rows, scale_cols): expected 0 to 2^30 each, got (" + std::to_string(rows) + ", " +
                          std::to_string(scale_cols) + ")");
}

inline Status check_outputs(int64_t rows, int64_t cols, const void* codes, const void* block_scales) {
  if (rows == 0 || cols == 0) return {};
  NVFP4_MOE_TRY(check_pointer("codes", codes));
  return check_pointer("block_scales", block_scales);
}

// nvfp4_moe_swiglu, read and checked.
struct Swiglu {
  GatedActivation activation;
  DType dtype;
  bool interleaved;
  float power_of_two;

  static Result<Swiglu> read(const nvfp4_moe_swiglu* options, int64_t rows, int64_t inner) {
    NVFP4_MOE_ASSIGN(const nvfp4_moe_swiglu o, read_struct("options", options));
    NVFP4_MOE_ASSIGN(const Activation function, read_enum("activation", o.activation, Activation::kSwigluOai));
    NVFP4_MOE_ASSIGN(
        const GatedActivation activation,
        GatedActivation::make(function, o.swiglu_limit == 0.0f ? std::nullopt : std::optional<float>(o.swiglu_limit),
                              o.swiglu_alpha == 0.0f ? MoeOptions{}.swiglu_alpha : o.swiglu_alpha));
    if (o.interleaved != 0 && o.interleaved != 1)
      return invalid_argument("interleaved: expected 0 or 1, got " + std::to_string(o.interleaved));
    if (o.power_of_two != 0.0f && !is_power_of_two(o.power_of_two))
      return invalid_argument("power_of_two: expected 0 or a normal power of two, got " +
                              std::to_string(o.power_of_two));
    NVFP4_MOE_TRY(check_matrix_size(rows, inner));
    NVFP4_MOE_ASSIGN(const DType dtype, read_dtype("dtype", o.dtype, DType::kBf16));
    NVFP4_MOE_TRY(check_activation_dtype("gate_up", dtype));
    return Swiglu{activation, dtype, o.interleaved == 1, o.power_of_two};
  }
};

}  // namespace nvfp4_moe::c_api
