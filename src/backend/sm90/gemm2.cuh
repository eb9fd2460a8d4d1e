// gemm2's epilogue and kernel: part.intermediate (R, I), down tiles -> part.rows_out (R, H) in
// row_format.
//
// row = alpha_down * dot in fp32, alpha = fl32(row scale * tensor scale), plus the bias if there is
// one, then converted to row_format. A nonfinite row is NaN, because its row scale is. Under bf16
// the intermediate itself is the operand, including NaN and Inf.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/gemm.cuh"
#include "backend/sm90/gemm_params.cuh"
#include "backend/sm90/requantize.cuh"

namespace nvfp4_moe::internal::sm90 {

template <class Products>
struct DownEpilogue : Gemm2Params {
  static constexpr bool kJoined = false, kReportsNonfinite = false;
  __device__ uint16_t* bf16_out() const { return out_fp32 ? nullptr : static_cast<uint16_t*>(out); }

  __device__ ExpertScales scales(int32_t expert) const { return {tensor_scales[expert].down, 0}; }
  // Rows are already in expert order, so the producer's "token" is the row.
  __device__ RowScale row_scale_of(int32_t row, int32_t) const {
    return {row_scale != nullptr ? row_scale[row] : 1.0f, 1.0f};
  }
  __device__ LaneBiases biases(int32_t expert, int32_t weight_row) const {
    return bias_table.of(expert, weight_row, channels);
  }
  __device__ void prefetch_biases(int32_t expert, int32_t weight_row) const {
    bias_table.prefetch(expert, weight_row, channels);
  }
  __device__ bool plain() const { return true; }
  __device__ float value(float accumulator, const RowFactor& factor, float bias) const {
    return fmaf(accumulator * Products::kAccumulatorFactor, factor.first, bias);
  }
  // first, second: accumulators of channels `channel` and `channel` + 8.
  __device__ void store(int64_t row, int32_t channel, float first, float second,
                        const RowFactor& factor, const LaneBiases& bias) const {
    const int64_t at = row * channels + channel;
    if (channel < channels) store_one(at, value(first, factor, bias.first));
    if (channel + 8 < channels) store_one(at + 8, value(second, factor, bias.second));
  }
  __device__ void store_one(int64_t at, float value) const {
    if (out_fp32)
      static_cast<float*>(out)[at] = value;
    else
      static_cast<uint16_t*>(out)[at] = cuda::bf16_from_float(value);
  }
};

// The kernel of a narrow configuration that also contains a wide one, used if route lists wide
// tiles. The narrow one gathers rows, the wide one copies them by TMA.
template <size_t kIndex>
__global__ void __launch_bounds__(GemmTraits<kIndex>::kThreads, 1) sm90_gemm2_narrow_or_wide_kernel(
    const __grid_constant__ GemmArgs narrow, const __grid_constant__ GemmArgs wide,
    const __grid_constant__ DownEpilogue<typename GemmTraits<kIndex>::Products> epilogue,
    const __grid_constant__ GatheredRows rows, const __grid_constant__ TmaRows tma_rows) {
  if (lists_wide(narrow))
    gemm<GemmTraits<wide_of<kIndex>>>(wide, epilogue, tma_rows);
  else
    gemm<GemmTraits<kIndex>>(narrow, epilogue, rows);
}

template <size_t kIndex, class Rows>
__global__ void __launch_bounds__(GemmTraits<kIndex>::kThreads, 1) sm90_gemm2_kernel(
    const __grid_constant__ GemmArgs args,
    const __grid_constant__ DownEpilogue<typename GemmTraits<kIndex>::Products> epilogue,
    const __grid_constant__ Rows rows) {
  gemm<GemmTraits<kIndex>>(args, epilogue, rows);
}

}  // namespace nvfp4_moe::internal::sm90
