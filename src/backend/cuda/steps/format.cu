// The format functions on arrays in device memory: the operations of core/quantize.cpp,
// core/dequantize.cpp and core/activation.cpp in the same order, in fp32 and double without
// contraction, so that every byte equals the host's.
// Long because every format function has a kernel here.
#include <cuda_runtime.h>

#include <cmath>

#include "backend/cuda/device/device.h"
#include "backend/cuda/steps/format.h"
#include "backend/cuda/steps/quantize.cuh"
#include "core/scale_layout.h"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kFormatThreads = 256;
constexpr uint32_t kNanBits = 0x7FC00000u;

unsigned format_ctas(int64_t threads) {
  return static_cast<unsigned>(ceil_div(threads, kFormatThreads));
}

__device__ uint32_t amax_of(const float (&x)[kBlock]) {
  uint32_t amax = 0;
#pragma unroll
  for (float value : x) amax = max(amax, magnitude_bits(value));
  return amax;
}

// codes: 16 of 4 bits each, the first in the lowest bits.
__device__ void store_block(uint8_t* codes, uint8_t* block_scales, int64_t block, uint64_t packed,
                            uint32_t byte) {
  block_scales[block] = static_cast<uint8_t>(byte);
  reinterpret_cast<uint64_t*>(codes)[block] = packed;
}

// The largest magnitude of a row, as bits. Called by a whole CTA of kRowThreads. at(i, x): loads
// the 16 elements from element i on.
template <class At>
__device__ uint32_t block_magnitude(int64_t count, const At& at) {
  __shared__ uint32_t warps[kRowWarps];
  uint32_t magnitude = 0;
  for (int64_t i = threadIdx.x * kBlock; i < count; i += kRowThreads * kBlock) {
    float x[kBlock];
    at(i, x);
    magnitude = max(magnitude, amax_of(x));
  }
  magnitude = __reduce_max_sync(0xFFFFFFFFu, magnitude);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = magnitude;
  __syncthreads();
  for (uint32_t one : warps) magnitude = max(magnitude, one);
  return magnitude;
}

template <class Rule>
__device__ void quantize_activations(const float (&x)[kBlock], const Rule& rule, uint8_t* codes,
                                     uint8_t* block_scales, int64_t block) {
  const uint32_t byte = e4m3_from_float(rule.scale_of(__uint_as_float(amax_of(x))));
  const float v = e4m3_to_float(byte), factor = rule.factor(v);
  const E2m1Boundaries boundaries(rule.boundary_scale(v));
  uint64_t packed = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i)
    packed |= uint64_t{byte == 0 ? 0 : boundaries.code(x[i] * factor)} << 4 * i;
  store_block(codes, block_scales, block, packed, byte);
}

// Quantizes one row of activations. Its codes and block scales are all 0 if the row is nonfinite.
// Returns whether it is.
template <class At>
__device__ bool quantize_row_of(int64_t count, const At& at, RowScalePolicy policy, float scale,
                                float* used, uint8_t* codes, uint8_t* block_scales) {
  const uint32_t amax = block_magnitude(count, at);
  const bool finite = amax < kInfBits;
  if (policy == RowScalePolicy::kDynamic)
    scale = power_of_two(dynamic_exponent(amax, kNvfp4RangeBits));
  *used = scale;
  for (int64_t block = threadIdx.x; block < count / kBlock; block += kRowThreads) {
    if (!finite) {
      store_block(codes, block_scales, block, 0, 0);
      continue;
    }
    float x[kBlock];
    at(block * kBlock, x);
    if (policy == RowScalePolicy::kVllmOrder)
      quantize_activations(x, VllmOrderRule{1.0f / scale}, codes, block_scales, block);
    else
      quantize_activations(x, PowerOfTwoRule{1.0f / scale}, codes, block_scales, block);
  }
  return finite;
}

template <DType kType>
__global__ void __launch_bounds__(kRowThreads)
    format_quantize_rows(DeviceQuantize call, RowScalePolicy policy) {
  const int64_t row = blockIdx.x;
  const auto at = [&](int64_t i, float(&x)[kBlock]) {
    load_elements<kType>(call.x, row * call.cols + i, x);
  };
  float used;
  const bool finite = quantize_row_of(call.cols, at, policy, call.tensor_scale, &used,
                                      call.codes + row * (call.cols / 2),
                                      call.block_scales + row * (call.cols / 16));
  if (threadIdx.x != 0) return;
  if (policy == RowScalePolicy::kDynamic)
    call.scales[row] = finite ? used : __uint_as_float(kNanBits);
  else if (!finite)
    *call.scales = __uint_as_float(
        kNanBits);  // replaces a valid scale; all CTAs that write write the same value
}

__global__ void format_set_scale(float* scale, float value) { *scale = value; }

// ---- weights: quotients in double

template <DType kType>
__global__ void __launch_bounds__(kFormatThreads)
    format_amax(const void* x, int64_t blocks, uint32_t* amax) {
  uint32_t magnitude = 0;
  for (int64_t block = int64_t{blockIdx.x} * kFormatThreads + threadIdx.x; block < blocks;
       block += int64_t{gridDim.x} * kFormatThreads) {
    float values[kBlock];
    load_elements<kType>(x, block * kBlock, values);
    magnitude = max(magnitude, amax_of(values));
  }
  magnitude = __reduce_max_sync(0xFFFFFFFFu, magnitude);
  if (threadIdx.x % 32 == 0) atomicMax(amax, magnitude);
}

// In place: the bits of the largest magnitude become the tensor scale.
__global__ void format_tensor_scale(float* scale, float given) {
  const uint32_t amax = __float_as_uint(*scale);
  if (amax >= kInfBits) {
    *scale = __uint_as_float(kNanBits);
    return;
  }
  const auto own = static_cast<float>(double{__uint_as_float(amax)} / 2688.0);
  *scale = given != 0.0f ? given : own == 0.0f ? 1.0f : own;
}

__device__ uint32_t e4m3_from_double(double x) {  // x >= 0; one rounding, saturated
  if (x >= 448.0) return 0x7E;
  if (x < 0x1p-6) return static_cast<uint32_t>(rint(x * 512.0));
  const auto bits = static_cast<uint64_t>(__double_as_longlong(x));
  constexpr int kDropped = 52 - 3;
  const uint64_t rounded =
      (bits + ((uint64_t{1} << (kDropped - 1)) - 1) + ((bits >> kDropped) & 1)) >> kDropped;
  return static_cast<uint32_t>(rounded) - ((1023u - 7u) << 3);
}

struct WeightBlock {
  float x[kBlock];
  double tensor_scale;

  __device__ uint64_t codes(uint32_t byte) const {
    if (byte == 0) return 0;
    // exact, and so are the boundaries below
    const double full_scale = double{e4m3_to_float(byte)} * tensor_scale;
    uint64_t packed = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const double a = fabs(double{x[i]});
      const uint32_t magnitude = (a > 0.25 * full_scale) + (a >= 0.75 * full_scale) +
                                 (a > 1.25 * full_scale) + (a >= 1.75 * full_scale) +
                                 (a > 2.5 * full_scale) + (a >= 3.5 * full_scale) +
                                 (a > 5.0 * full_scale);
      packed |= uint64_t{magnitude | (__float_as_uint(x[i]) >> 28 & 8u)} << 4 * i;
    }
    return packed;
  }
  __device__ double squared_error(uint32_t byte) const {
    const double full_scale = double{e4m3_to_float(byte)} * tensor_scale;
    const uint64_t packed = codes(byte);
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const double error =
          double{x[i]} -
          double{e2m1_to_float(static_cast<uint32_t>(packed >> 4 * i) & 15)} * full_scale;
      sum += error * error;
    }
    return sum;
  }
  // The best of the E4M3 neighbours of amax/6 and amax/4; the one nearest to amax/6 if no other is
  // strictly better.
  __device__ uint32_t search(float amax) const {
    const double six_s = 6.0 * tensor_scale;
    const uint32_t first = e4m3_from_double(double{amax} / six_s);
    uint32_t best = first;
    double best_error = squared_error(first);
    for (int of = 0; of < 2; ++of) {
      const double quotient = of == 0 ? double{amax} / six_s : 1.5 * double{amax} / six_s;
      const uint32_t nearest = e4m3_from_double(quotient);
      const double value = e4m3_to_float(nearest);
      const uint32_t low = value > quotient ? nearest - 1 : nearest;
      const uint32_t high = value < quotient ? min(nearest + 1, 126u) : nearest;
      for (int side = 0; side < 2; ++side) {
        const uint32_t candidate = side == 0 ? low : high;
        if (candidate == first) continue;
        const double error = squared_error(candidate);
        if (error < best_error) best = candidate, best_error = error;
      }
    }
    return best;
  }
};

// One thread per block of 16; *scales is the tensor scale.
template <DType kType>
__global__ void __launch_bounds__(kFormatThreads) format_quantize_weights(DeviceQuantize call) {
  const int64_t block = int64_t{blockIdx.x} * kFormatThreads + threadIdx.x;
  if (block >= call.rows * (call.cols / kBlock)) return;
  const float scale = *call.scales;
  if (isnan(scale)) return store_block(call.codes, call.block_scales, block, 0, 0);
  WeightBlock weights;
  weights.tensor_scale = scale;
  load_elements<kType>(call.x, block * kBlock, weights.x);
  const float amax = __uint_as_float(amax_of(weights.x));
  const uint32_t byte = call.how == DeviceQuantizer::kWeightsMse && amax > 0
                            ? weights.search(amax)
                            : e4m3_from_double(double{amax} / (6.0 * weights.tensor_scale));
  store_block(call.codes, call.block_scales, block, weights.codes(byte), byte);
}

// ---- dequantize

// Rounds x to a float such that a second rounding, to bf16 or fp16, gives the correctly rounded x.
__device__ float round_to_odd(double x) {
  const float toward_zero = __double2float_rz(x);
  return double{toward_zero} == x ? toward_zero
                                  : __uint_as_float(__float_as_uint(toward_zero) | 1u);
}

template <DType kType>
__global__ void __launch_bounds__(kFormatThreads) format_dequantize(DeviceDequantize call) {
  const int64_t block = int64_t{blockIdx.x} * kFormatThreads + threadIdx.x;
  const int64_t blocks_of_row = call.cols / kBlock;
  if (block >= call.rows * blocks_of_row) return;
  const uint32_t byte = call.block_scales[block];
  const float scale = call.scales == nullptr ? call.tensor_scale
                      : call.scale_of_row    ? call.scales[block / blocks_of_row]
                                             : *call.scales;
  const double full_scale = double{e4m3_to_float(byte)} * double{scale};
  const bool valid = byte < 0x7F && !isnan(scale);
  uint8_t codes[kBlock / 2];
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) codes[i] = call.codes[block * (kBlock / 2) + i];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    // exact in double
    const double value = double{e2m1_to_float(codes[i / 2] >> i % 2 * 4 & 15u)} * full_scale;
    const int64_t at = block * kBlock + i;
    if constexpr (kType == DType::kF32)
      static_cast<float*>(call.out)[at] =
          valid ? static_cast<float>(value) : __uint_as_float(kNanBits);
    else if constexpr (kType == DType::kF16)
      static_cast<uint16_t*>(call.out)[at] =
          valid ? __half_as_ushort(__float2half_rn(round_to_odd(value))) : 0x7E00;
    else
      static_cast<uint16_t*>(call.out)[at] = valid ? bf16_from_float(round_to_odd(value)) : 0x7FC0;
  }
}

// ---- gemm1's output to gemm2's input

// kGeluOrSitu: as is_gelu_or_situ. Their kernels are separate, since they compute in double.
template <DType kType, bool kGeluOrSitu>
__global__ void __launch_bounds__(kRowThreads) format_swiglu_quantize(DeviceSwigluQuantize call) {
  const int64_t row = blockIdx.x, inner = call.input.inner;
  const auto h_at = [&](int64_t i, float(&h)[kBlock]) {
    float first[kBlock], second[kBlock];
    const int64_t begin = row * 2 * inner;
    load_elements<kType>(call.input.data, begin + (call.input.interleaved ? 2 * i : i), first);
    load_elements<kType>(call.input.data,
                         begin + (call.input.interleaved ? 2 * i + kBlock : inner + i), second);
#pragma unroll
    for (int j = 0; j < kBlock; ++j) {
      float gate = first[j], up = second[j];
      if (call.input.interleaved) {
        gate = j < kBlock / 2 ? first[2 * j % kBlock] : second[2 * j % kBlock];
        up = j < kBlock / 2 ? first[(2 * j + 1) % kBlock] : second[(2 * j + 1) % kBlock];
      }
      const float value = kGeluOrSitu ? call.activation.gelu_or_situ(gate, up)
                                      : call.activation.swiglu_or_relu2(gate, up);
      h[j] = bf16_to_float(
          bf16_from_float(call.row_weights == nullptr ? value : value * call.row_weights[row]));
    }
  };
  float used;
  const RowScalePolicy policy =
      call.power_of_two == 0.0f ? RowScalePolicy::kDynamic : RowScalePolicy::kPowerOfTwo;
  const bool finite = quantize_row_of(inner, h_at, policy, call.power_of_two, &used,
                                      call.out.codes + row * (inner / 2),
                                      call.out.block_scales + row * (inner / kBlock));
  if (threadIdx.x == 0) call.out.row_scales[row] = finite ? used : __uint_as_float(kNanBits);
}

// ---- the 128x4 layout

// One thread per four bytes of a padded row.
__global__ void __launch_bounds__(kFormatThreads)
    format_swizzle(const uint8_t* linear, int64_t matrices, int64_t rows, int64_t cols,
                   uint8_t* swizzled) {
  const int64_t padded_rows = (rows + 127) / 128 * 128, quads = (cols + 3) / 4;
  const int64_t index = int64_t{blockIdx.x} * kFormatThreads + threadIdx.x;
  if (index >= matrices * padded_rows * quads) return;
  const int64_t quad = index % quads, row = index / quads % padded_rows,
                matrix = index / (quads * padded_rows);
  uint8_t* const to =
      swizzled + matrix * (padded_rows * quads * 4) + swizzled_scale_offset(row, 4 * quad, cols);
  for (int i = 0; i < 4; ++i) {
    const int64_t col = 4 * quad + i;
    to[i] = row < rows && col < cols ? linear[(matrix * rows + row) * cols + col] : 0;
  }
}
__global__ void __launch_bounds__(kFormatThreads)
    format_unswizzle(const uint8_t* swizzled, int64_t matrices, int64_t rows, int64_t cols,
                     uint8_t* linear) {
  const int64_t index = int64_t{blockIdx.x} * kFormatThreads + threadIdx.x;
  if (index >= matrices * rows * cols) return;
  const int64_t bytes = (rows + 127) / 128 * 128 * ((cols + 3) / 4 * 4);
  const int64_t col = index % cols, row = index / cols % rows, matrix = index / (cols * rows);
  linear[index] = swizzled[matrix * bytes + swizzled_scale_offset(row, col, cols)];
}

// ---- launches

// Calls body with the dtype as a compile-time constant.
template <class Body>
void with_dtype(DType dtype, const Body& body) {
  if (dtype == DType::kF32) return body(std::integral_constant<DType, DType::kF32>{});
  if (dtype == DType::kF16) return body(std::integral_constant<DType, DType::kF16>{});
  body(std::integral_constant<DType, DType::kBf16>{});
}

Status check_ctas(const char* what, int64_t ctas) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;  // CTAs of a grid along x
  if (ctas <= kMost) return {};
  return invalid_argument(std::string(what) + ": expected at most " + std::to_string(kMost) +
                          " CTAs, got " + std::to_string(ctas));
}

Status check_codes(const uint8_t* codes) {
  if (reinterpret_cast<uintptr_t>(codes) % 8 == 0) return {};
  return invalid_argument("codes: expected an 8-byte aligned array on the device");
}

Status quantize(int device, const DeviceQuantize& call, void* queue) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  NVFP4_MOE_TRY(check_codes(call.codes));
  auto* const stream = static_cast<cudaStream_t>(queue);
  const int64_t blocks = call.rows * (call.cols / kBlock);
  NVFP4_MOE_TRY(check_ctas("quantize", std::max(call.rows, ceil_div(blocks, kFormatThreads))));
  const bool weights =
      call.how == DeviceQuantizer::kWeights || call.how == DeviceQuantizer::kWeightsMse;
  if (weights) {
    NVFP4_MOE_TRY(check(cudaMemsetAsync(call.scales, 0, sizeof(float), stream), "quantize"));
    with_dtype(call.dtype, [&](auto dtype) {
      constexpr unsigned kMostCtas = 4096;
      if (blocks > 0)
        format_amax<dtype.value>
            <<<std::min(format_ctas(blocks), kMostCtas), kFormatThreads, 0, stream>>>(
                call.x, blocks, reinterpret_cast<uint32_t*>(call.scales));
      format_tensor_scale<<<1, 1, 0, stream>>>(call.scales, call.tensor_scale);
      if (blocks > 0)
        format_quantize_weights<dtype.value>
            <<<format_ctas(blocks), kFormatThreads, 0, stream>>>(call);
    });
    return check_launch("quantize");
  }
  const RowScalePolicy policy =
      call.how == DeviceQuantizer::kDynamicToken ? RowScalePolicy::kDynamic
      : call.how == DeviceQuantizer::kVllmOrder  ? RowScalePolicy::kVllmOrder
                                                 : RowScalePolicy::kPowerOfTwo;
  if (policy != RowScalePolicy::kDynamic)
    format_set_scale<<<1, 1, 0, stream>>>(call.scales, call.tensor_scale);
  if (call.rows > 0)
    with_dtype(call.dtype, [&](auto dtype) {
      format_quantize_rows<dtype.value>
          <<<static_cast<unsigned>(call.rows), kRowThreads, 0, stream>>>(call, policy);
    });
  return check_launch("quantize");
}

Status dequantize(int device, const DeviceDequantize& call, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const int64_t blocks = call.rows * (call.cols / kBlock);
  if (blocks == 0) return {};
  NVFP4_MOE_TRY(check_ctas("dequantize", ceil_div(blocks, kFormatThreads)));
  with_dtype(call.out_dtype, [&](auto dtype) {
    format_dequantize<dtype.value>
        <<<format_ctas(blocks), kFormatThreads, 0, static_cast<cudaStream_t>(stream)>>>(call);
  });
  return check_launch("dequantize");
}

Status swiglu_quantize(int device, const DeviceSwigluQuantize& call, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  NVFP4_MOE_TRY(check_codes(call.out.codes));
  if (call.input.rows == 0) return {};
  NVFP4_MOE_TRY(check_ctas("swiglu_quantize", call.input.rows));
  with_dtype(call.input.dtype, [&](auto dtype) {
    const auto kernel = is_gelu_or_situ(call.activation.function)
                            ? format_swiglu_quantize<dtype.value, true>
                            : format_swiglu_quantize<dtype.value, false>;
    kernel<<<static_cast<unsigned>(call.input.rows), kRowThreads, 0,
             static_cast<cudaStream_t>(stream)>>>(call);
  });
  return check_launch("swiglu_quantize");
}

Status swizzle(int device, const uint8_t* linear, int64_t matrices, int64_t rows,
               int64_t scale_cols, uint8_t* swizzled, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const int64_t threads = matrices * round_up(rows, 128) * ceil_div(scale_cols, 4);
  if (threads == 0) return {};
  NVFP4_MOE_TRY(check_ctas("swizzle", ceil_div(threads, kFormatThreads)));
  format_swizzle<<<format_ctas(threads), kFormatThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      linear, matrices, rows, scale_cols, swizzled);
  return check_launch("swizzle");
}

Status unswizzle(int device, const uint8_t* swizzled, int64_t matrices, int64_t rows,
                 int64_t scale_cols, uint8_t* linear, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const int64_t threads = matrices * rows * scale_cols;
  if (threads == 0) return {};
  NVFP4_MOE_TRY(check_ctas("unswizzle", ceil_div(threads, kFormatThreads)));
  format_unswizzle<<<format_ctas(threads), kFormatThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      swizzled, matrices, rows, scale_cols, linear);
  return check_launch("unswizzle");
}

}  // namespace

constinit const DeviceFormats kFormats = {quantize, dequantize, swiglu_quantize, swizzle,
                                          unswizzle};

}  // namespace nvfp4_moe::internal::cuda
