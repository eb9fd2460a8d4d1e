// Shared by the kernels that quantize rows of activations: their arguments, the rule for a row's
// scale, reductions over the threads of a row, and the layout of its operand.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/quantize_e4m3.cuh"
#include "backend/cuda/steps/quantize_vec8.cuh"
#include "backend/cuda/steps/thread_group.cuh"

namespace nvfp4_moe::internal::cuda {

inline constexpr int kRowWarps = kRowThreads / 32;
inline constexpr int kBlock = 16;

enum class RowScalePolicy : int { kDynamic, kPowerOfTwo, kVllmOrder };

inline constexpr uint32_t kNvfp4RangeBits = 0x45280000u;  // 2688
// Exponent of the smallest power of two s with amax <= range s; 0 for a row of zeros. range: fp32
// bits.
__device__ inline int dynamic_exponent(uint32_t amax, uint32_t range) {
  if (amax == 0) return 0;
  const int exponent = static_cast<int>(amax >> 23) - static_cast<int>(range >> 23) +
                       ((amax & 0x7FFFFFu) > (range & 0x7FFFFFu));
  return max(exponent, -126);
}

__device__ inline float power_of_two(int exponent) {  // -126 .. 127
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// The scale of a row and its inverse, from the row's largest magnitude, given as the bits of a
// finite float.
struct RowScaleRule {
  bool dynamic;
  uint32_t range;        // largest magnitude under a row scale of 1, as fp32 bits
  float scale, inverse;  // for every row, unless dynamic

  RowScaleRule() = default;
  RowScaleRule(RowScalePolicy policy, ActivationFormat format, float scale_)
      : dynamic(policy == RowScalePolicy::kDynamic),
        range(std::bit_cast<uint32_t>(static_cast<float>(row_scale_range(format)))),
        scale(scale_),
        inverse(1.0f / scale_) {}
  __device__ float scale_of(uint32_t amax) const {
    return dynamic ? power_of_two(dynamic_exponent(amax, range)) : scale;
  }
  __device__ float inverse_of(uint32_t amax) const {
    return dynamic ? power_of_two(-dynamic_exponent(amax, range)) : inverse;
  }
};

struct Counters {
  uint64_t* nonfinite;
  uint64_t* blocks;
  uint64_t* saturated;
  uint64_t* zeroed;
};

struct RowArgs {
  const void* x;  // (rows, K)
  int64_t k;
  RowScalePolicy policy;
  RowScaleRule rule;
  ActivationBuffers out;  // codes, fp8 null: neither codes nor block scales are needed
  std::byte* operand;     // (rows, K): rows of operand_row_bytes
  Operand operand_kind;
  Counters counters;
  // (T, top_k): rows are tokens, some without a row in expert order; null: all have one
  const int32_t* row_of_assignment;
  int64_t top_k;
  const int64_t* row_count;  // (1) number of rows of x; null: one per CTA
};

__device__ inline void add(uint64_t* counter, unsigned value) {
  value = __reduce_add_sync(0xFFFFFFFFu, value);
  if (threadIdx.x % 32 == 0 && value != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), uint64_t{value});
}

__device__ inline bool wanted(const RowArgs& args, int64_t row) {
  if (args.row_count != nullptr) return row < *args.row_count;
  if (args.row_of_assignment == nullptr) return true;
  for (int64_t k = 0; k < args.top_k; ++k)
    if (args.row_of_assignment[row * args.top_k + k] >= 0) return true;
  return false;
}

// The largest of all threads' magnitudes.
__device__ inline uint32_t cta_magnitude(uint32_t magnitude) {
  __shared__ uint32_t warp_magnitudes[kVec8Threads / 32];
  magnitude = __reduce_max_sync(0xFFFFFFFFu, magnitude);
  if (threadIdx.x % 32 == 0) warp_magnitudes[threadIdx.x / 32] = magnitude;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(blockDim.x / 32); ++warp)
    magnitude = max(magnitude, warp_magnitudes[warp]);
  return magnitude;
}

// max |x| of the row as bits: finite < Inf < NaN. Called by the whole CTA.
template <DType kType>
__device__ uint32_t row_magnitude(const RowArgs& args, int64_t first) {
  uint32_t magnitude = 0;
  for (int64_t i = threadIdx.x * kBlock; i < args.k; i += blockDim.x * kBlock) {
    float x[kBlock];
    load_elements<kType>(args.x, first + i, x);
#pragma unroll
    for (float value : x) magnitude = max(magnitude, magnitude_bits(value));
  }
  return cta_magnitude(magnitude);
}

// Loads vec8 i of a row. A thread's vec8s are group.size apart; the first one stays in registers.
__device__ inline uint4 load_vec8(const RowArgs& args, int64_t row, int64_t i) {
  if (i >= args.k / 8) return make_uint4(0, 0, 0, 0);
  return __ldcg(static_cast<const uint4*>(args.x) + row * (args.k / 8) + i);
}
// The largest magnitude of one thread's elements, as fp32 bits.
__device__ inline uint32_t vec8_magnitude(const RowArgs& args, int64_t row, const uint4& first,
                                          ThreadGroup group) {
  uint32_t magnitudes = larger_magnitudes(first);
#pragma unroll 4
  for (int64_t i = group.rank + group.size; i < args.k / 8; i += group.size)
    magnitudes = __vmaxu2(magnitudes, larger_magnitudes(load_vec8(args, row, i)));
  return larger_half(magnitudes);
}

// Only these architectures have FP4 tensor cores; for others that branch is not compiled.
#if __CUDA_ARCH__ >= 1000
inline constexpr bool kHasFp4Operands = true;
#else
inline constexpr bool kHasFp4Operands = false;
#endif

// Writes vec8 i of a row's operand.
__device__ inline void put_e4m3(std::byte* row, Operand kind, int64_t i, const E4m3Vec8& vec8) {
  if (kind == Operand::kE4m3) {
    std::byte* const to = row + fp8_vec8_offset(i);
    *reinterpret_cast<uint32_t*>(to) = vec8.codes[0];
    *reinterpret_cast<uint32_t*>(to + kFp8SecondWord) = vec8.codes[1];
  } else {
    const uint2 low = bf16_from_e4m3x4(vec8.codes[0]), high = bf16_from_e4m3x4(vec8.codes[1]);
    reinterpret_cast<uint4*>(row)[i] = make_uint4(low.x, low.y, high.x, high.y);
  }
}
// Writes the operand of a row, in vec8s of a format.
template <class Vec>
struct OperandRow {
  // Whether rows may have padding: for NVFP4 only with FP4 tensor cores.
  static constexpr bool kMayPad = kHasFp4Operands || std::is_same_v<Vec, E4m3Vec8>;
  std::byte* row;
  Operand kind;
  int64_t vec8s;  // including padding
  __device__ OperandRow(const RowArgs& args, int64_t index)
      : row(args.operand),
        kind(kMayPad ? args.operand_kind : Operand::kBf16),
        vec8s(operand_row_vec8s(kind, args.k)) {
    row += index * operand_row_bytes(kind, args.k);
  }
  // Whether vec8 i is in the padding, beyond the row's elements.
  __device__ bool pads(int64_t i) const { return kMayPad && i < vec8s; }
  __device__ void put(int64_t i, const E4m3Vec8& vec8) const { put_e4m3(row, kind, i, vec8); }
  __device__ void put(int64_t i, const Vec8& vec8) const {
    if (kHasFp4Operands && kind == Operand::kFp4) {
      *reinterpret_cast<uint32_t*>(row + fp4_codes_offset(i)) = vec8.codes;
      if (i % 2 == 0) row[fp4_scale_offset(i)] = static_cast<std::byte>(vec8.scale);
    } else {
      reinterpret_cast<uint4*>(row)[i] = vec8.operand;
    }
  }
};

// Writes vec8 i of a row to the arrays of the contract, if they are needed.
__device__ inline bool wants_codes(const RowArgs& args) {
  return args.out.codes != nullptr || args.out.fp8 != nullptr;
}
__device__ inline void put_codes(const RowArgs& args, int64_t row, int64_t i, const Vec8& vec8) {
  const int64_t at = row * (args.k / 8) + i;
  reinterpret_cast<uint32_t*>(args.out.codes)[at] = vec8.codes;
  if (i % 2 == 0) args.out.block_scales[at / 2] = static_cast<uint8_t>(vec8.scale);
}
__device__ inline void put_codes(const RowArgs& args, int64_t row, int64_t i,
                                 const E4m3Vec8& vec8) {
  reinterpret_cast<uint2*>(args.out.fp8)[row * (args.k / 8) + i] =
      make_uint2(vec8.codes[0], vec8.codes[1]);
}

}  // namespace nvfp4_moe::internal::cuda
