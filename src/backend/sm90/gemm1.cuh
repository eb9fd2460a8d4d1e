// gemm1_swiglu's epilogue and kernel: hidden (T, H), joined gate/up tiles -> part.intermediate.bf16 (R, I).
//
// g = alpha_gate * dot, u = alpha_up * dot in fp32, alpha = fl32(row scale * tensor scale); the activation function,
// the router weight under before_down, one rounding to bf16. Gate and up of one channel are weight rows r and r + 8, so
// that both accumulators are in one lane. Rows of a nonfinite token are NaN: their row scale is.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/gemm.cuh"
#include "backend/sm90/gemm_params.cuh"

namespace nvfp4_moe::sm90 {

template <bool kReports, class Products>
struct SwigluEpilogue : Gemm1Params {
  static constexpr bool kJoined = true, kReportsNonfinite = kReports;
  __device__ void report_if(bool nonfinite_value, int64_t row) const {
    if (nonfinite_value && nonfinite_rows != nullptr) nonfinite_rows[row] = 1;
  }
  __device__ uint16_t* bf16_out() const { return out; }

  __device__ ExpertScales scales(int32_t expert) const {
    return {tensor_scales[expert].gate, tensor_scales[expert].up};
  }
  __device__ RowScale row_scale_of(int32_t token, int32_t assignment) const {
    const float scale = row_scale != nullptr ? row_scale[token] : 1.0f;
    return {nonfinite[token] != 0 ? __uint_as_float(0x7FC00000u) : scale,
            router_weights != nullptr ? router_weights[assignment] : 1.0f};
  }
  __device__ bool plain() const { return activation.plain; }
  template <bool kPlain>
  __device__ float value(float gate, float up, const RowFactor& factor) const {
    constexpr float kFactor = Products::kAccumulatorFactor;
    return activation.gated<kPlain>(gate * kFactor * factor.first, up * kFactor * factor.second) * factor.weight;
  }
  // gate, up: accumulators. weight_row: of gate; 8 further is up of the same channel.
  __device__ void store(int64_t row, int32_t weight_row, float gate, float up, const RowFactor& factor) const {
    const int64_t channel = cuda::joined_row(weight_row).row;
    if (channel >= channels) return;
    const uint16_t bits = cuda::bf16_from_float(value<false>(gate, up, factor));
    out[row * channels + channel] = bits;
    if constexpr (kReports) report_if((bits & 0x7F80u) == 0x7F80u, row);
  }
};

// Under fp8 requantize counts nonfinite rows.
template <class Traits>
using SwigluEpilogueOf = SwigluEpilogue<Traits::kTmaRows && !Traits::kFp8, typename Traits::Products>;

template <size_t kIndex, class Rows>
__global__ void __launch_bounds__(GemmTraits<kIndex>::kThreads, 1)
    sm90_gemm1_kernel(const __grid_constant__ GemmArgs args,
                      const __grid_constant__ SwigluEpilogueOf<GemmTraits<kIndex>> epilogue,
                      const __grid_constant__ Rows rows) {
  gemm<GemmTraits<kIndex>>(args, epilogue, rows);
}

}  // namespace nvfp4_moe::sm90
