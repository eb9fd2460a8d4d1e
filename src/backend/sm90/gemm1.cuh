// gemm1_swiglu's epilogues and kernel: hidden (T, H) and joined gate/up tiles (or up tiles, without
// a gate) -> part.intermediate.bf16 (R, I).
//
// g = alpha_gate * dot and u = alpha_up * dot in fp32, alpha = fl32(row scale * tensor scale), plus
// their biases if there are any. Then the activation function, the router weight under before_down,
// and one rounding to bf16. Gate and up of one channel are weight rows r and r + 8, so both
// accumulators are in one lane. Without a gate these rows are two channels of up and go through
// relu2. Rows of a nonfinite token are NaN, because their row scale is.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "backend/cuda/steps/formats.cuh"
#include "backend/sm90/gemm.cuh"
#include "backend/sm90/gemm_params.cuh"

namespace nvfp4_moe::internal::sm90 {

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
  __device__ LaneBiases biases(int32_t expert, int32_t weight_row) const {
    return bias_table.of(expert, cuda::joined_channel(weight_row), channels);
  }
  __device__ void prefetch_biases(int32_t expert, int32_t weight_row) const {
    bias_table.prefetch(expert, cuda::joined_channel(weight_row), channels);
  }
  __device__ bool plain() const { return activation.plain; }
  template <bool kPlain>
  __device__ float value(float gate, float up, const RowFactor& factor,
                         const LaneBiases& bias) const {
    constexpr float kFactor = Products::kAccumulatorFactor;
    return activation.gated<kPlain>(fmaf(gate * kFactor, factor.first, bias.first),
                                    fmaf(up * kFactor, factor.second, bias.second)) *
           factor.weight;
  }
  // gate, up: accumulators. weight_row: gate's; up of the same channel is 8 rows further.
  __device__ void store(int64_t row, int32_t weight_row, float gate, float up,
                        const RowFactor& factor, const LaneBiases& bias) const {
    const int64_t channel = cuda::joined_channel(weight_row);
    if (channel >= channels) return;
    store_one(row, channel, value<false>(gate, up, factor, bias));
  }
  __device__ void store_one(int64_t row, int64_t channel, float value) const {
    const uint16_t bits = cuda::bf16_from_float(value);
    out[row * channels + channel] = bits;
    if constexpr (kReports) report_if((bits & 0x7F80u) == 0x7F80u, row);
  }
};

// For a layer without a gate. up's alpha is a row's second factor, as above.
template <bool kReports, class Products>
struct Relu2Epilogue : SwigluEpilogue<kReports, Products> {
  static constexpr bool kJoined = false;
  __device__ LaneBiases biases(int32_t expert, int32_t weight_row) const {
    return this->bias_table.of(expert, weight_row, this->channels);
  }
  __device__ void prefetch_biases(int32_t expert, int32_t weight_row) const {
    this->bias_table.prefetch(expert, weight_row, this->channels);
  }
  __device__ bool plain() const { return true; }
  __device__ float value(float accumulator, const RowFactor& factor, float bias) const {
    return cuda::relu2(fmaf(accumulator * Products::kAccumulatorFactor, factor.second, bias)) *
           factor.weight;
  }
  // first, second: accumulators of channels `channel` and `channel` + 8. The number of channels is
  // a multiple of 16.
  __device__ void store(int64_t row, int32_t channel, float first, float second,
                        const RowFactor& factor, const LaneBiases& bias) const {
    if (channel >= this->channels) return;
    this->store_one(row, channel, value(first, factor, bias.first));
    this->store_one(row, channel + 8, value(second, factor, bias.second));
  }
};

// gelu, gelu_tanh and situ, in kernels of their own.
template <bool kReports, class Products>
struct GeluOrSituEpilogue : SwigluEpilogue<kReports, Products> {
  // Wide tiles are then never stored one by one, and that code is not compiled.
  __device__ uint16_t* bf16_out() const {
    __builtin_assume(this->out != nullptr);
    return this->out;
  }
  __device__ bool plain() const { return !this->gelu_or_situ.capped; }
  template <bool kPlain>
  __device__ float value(float gate, float up, const RowFactor& factor,
                         const LaneBiases& bias) const {
    constexpr float kFactor = Products::kAccumulatorFactor;
    return this->gelu_or_situ.template gated<kPlain>(
               fmaf(gate * kFactor, factor.first, bias.first),
               fmaf(up * kFactor, factor.second, bias.second)) *
           factor.weight;
  }
  __device__ void store(int64_t row, int32_t weight_row, float gate, float up,
                        const RowFactor& factor, const LaneBiases& bias) const {
    const int64_t channel = cuda::joined_channel(weight_row);
    if (channel >= this->channels) return;
    this->store_one(row, channel, value<false>(gate, up, factor, bias));
  }
};

template <cuda::Gemm1Function kFunction>
struct Gemm1Epilogue;
template <>
struct Gemm1Epilogue<cuda::Gemm1Function::kSwiglu> {
  template <bool kReports, class Products>
  using Of = SwigluEpilogue<kReports, Products>;
};
template <>
struct Gemm1Epilogue<cuda::Gemm1Function::kGeluOrSitu> {
  template <bool kReports, class Products>
  using Of = GeluOrSituEpilogue<kReports, Products>;
};
template <>
struct Gemm1Epilogue<cuda::Gemm1Function::kRelu2> {
  template <bool kReports, class Products>
  using Of = Relu2Epilogue<kReports, Products>;
};
// Under fp8 requantize counts nonfinite rows.
template <class Traits, cuda::Gemm1Function kFunction>
using Gemm1EpilogueOf =
    typename Gemm1Epilogue<kFunction>::template Of<Traits::kTmaRows && !Traits::kFp8,
                                                   typename Traits::Products>;

// The kernel of a narrow configuration that also contains a wide one, used if route lists wide
// tiles. Both gather rows.
template <size_t kIndex, class Epilogue>
__global__ void __launch_bounds__(GemmTraits<kIndex>::kThreads, 1)
    sm90_gemm1_narrow_or_wide_kernel(const __grid_constant__ GemmArgs narrow,
                                     const __grid_constant__ GemmArgs wide,
                                     const __grid_constant__ Epilogue epilogue,
                                     const __grid_constant__ GatheredRows rows) {
  if (lists_wide(narrow))
    gemm<GemmTraits<wide_of<kIndex>, true>>(wide, epilogue, rows);
  else
    gemm<GemmTraits<kIndex>>(narrow, epilogue, rows);
}

template <size_t kIndex, class Rows, class Epilogue>
__global__ void __launch_bounds__(GemmTraits<kIndex>::kThreads, 1)
    sm90_gemm1_kernel(const __grid_constant__ GemmArgs args,
                      const __grid_constant__ Epilogue epilogue,
                      const __grid_constant__ Rows rows) {
  gemm<GemmTraits<kIndex>>(args, epilogue, rows);
}

}  // namespace nvfp4_moe::internal::sm90
