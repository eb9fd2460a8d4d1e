// quantize and requantize: rows of activations to what the GEMMs multiply.
//
//   nvfp4   codes (rows, K/2), block scales (rows, K/16), row scales (rows), and the operand (rows, K): e2m1 * e4m3 in
//           bf16, exactly, for tensor cores without FP4; for those with it codes and scales once more (fp4_operand.h)
//   bf16    hidden rounded once; of the intermediate, which is bf16 already, only nonfinite rows are counted
//
// Rows are tokens in quantize, and rows in expert order in requantize. A CTA takes a row; a bf16 row whose scale is a
// power of two goes by vec8 (quantize_vec8.cuh) and is read once where the CTA has enough threads for it. The formulas,
// in this order of fp32 operations, are docs/numerics.md section 3 and docs/format.md. A nonfinite row gets flag 1,
// codes, scales and operands of 0, and a NaN row scale. Only tokens that have a row in expert order are read: what
// belongs to another one stays as it is, with flag 0. Counters are accumulators of integers, so that their order does
// not show.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/quantize_vec8.cuh"

namespace nvfp4_moe::cuda {

inline constexpr int kRowWarps = kRowThreads / 32;
inline constexpr int kBlock = 16;

enum class RowScalePolicy : int { kDynamic, kPowerOfTwo, kCompat };

// Exponent of the smallest power of two s with amax <= 2688 s, 2688 = 1.3125 * 2^11; 0 for a row of zeros.
__device__ inline int dynamic_exponent(uint32_t amax) {
  if (amax == 0) return 0;
  const int exponent = static_cast<int>(amax >> 23) - 127 - 11 + ((amax & 0x7FFFFFu) > 0x280000u);
  return max(exponent, -126);
}

__device__ inline float power_of_two(int exponent) {  // -126 .. 127
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// The scale of a row and its inverse, given the row's largest magnitude as the bits of a finite float.
struct RowScaleRule {
  bool dynamic;
  float scale, inverse;  // of every row, unless dynamic

  RowScaleRule() = default;
  RowScaleRule(RowScalePolicy policy, float scale_)
      : dynamic(policy == RowScalePolicy::kDynamic), scale(scale_), inverse(1.0f / scale_) {}
  __device__ float scale_of(uint32_t amax) const { return dynamic ? power_of_two(dynamic_exponent(amax)) : scale; }
  __device__ float inverse_of(uint32_t amax) const { return dynamic ? power_of_two(-dynamic_exponent(amax)) : inverse; }
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
  ActivationBuffers out;  // codes null: neither codes nor block scales are wanted
  std::byte* operand;     // (rows, K): rows of operand_row_bytes
  bool fp4_operand;
  Counters counters;
  const int32_t*
      row_of_assignment;  // (T, top_k): rows are tokens, some without a row in expert order; null: all have one
  int64_t top_k;
  const int64_t* row_count;  // how many rows of x are there; null: as many as CTAs
};

__device__ inline void add(uint64_t* counter, unsigned value) {
  value = __reduce_add_sync(0xFFFFFFFFu, value);
  if (threadIdx.x % 32 == 0 && value != 0) atomicAdd(reinterpret_cast<unsigned long long*>(counter), uint64_t{value});
}

__device__ inline bool wanted(const RowArgs& args, int64_t row) {
  if (args.row_count != nullptr) return row < *args.row_count;
  if (args.row_of_assignment == nullptr) return true;
  for (int64_t k = 0; k < args.top_k; ++k)
    if (args.row_of_assignment[row * args.top_k + k] >= 0) return true;
  return false;
}

// Who works on a row together: a CTA, or, where there are many rows, a warp, which waits for no other one.
struct ThreadGroup {
  int rank, size;
  __device__ static ThreadGroup cta() { return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)}; }
  __device__ static ThreadGroup warp() { return {static_cast<int>(threadIdx.x % 32), 32}; }
};

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

// max |x| of the row as bits: finite < Inf < NaN. By the whole CTA.
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

// A row by vec8: those of one thread lie a group's size apart, and its first one stays in registers.
__device__ inline uint4 load_vec8(const RowArgs& args, int64_t row, int64_t i) {
  if (i >= args.k / 8) return make_uint4(0, 0, 0, 0);
  return __ldcg(static_cast<const uint4*>(args.x) + row * (args.k / 8) + i);
}
// The largest magnitude of one thread's elements, as fp32's bits.
__device__ inline uint32_t vec8_magnitude(const RowArgs& args, int64_t row, const uint4& first, ThreadGroup group) {
  uint32_t magnitudes = larger_magnitudes(first);
#pragma unroll 4
  for (int64_t i = group.rank + group.size; i < args.k / 8; i += group.size)
    magnitudes = __vmaxu2(magnitudes, larger_magnitudes(load_vec8(args, row, i)));
  return larger_half(magnitudes);
}

// Both rules give an element's scaled magnitude, and what the boundaries between e2m1's values are multiplied by to be
// compared with it. The formula of a power of two is e2m1(x * inverse / v); a boundary times v is exact, so that
// comparing with it decides as the rounded quotient does: the nearest floats to a boundary t v lie 2^-24 of it away or
// more, and their quotients by v are further from t than rounding reaches.
struct PowerOfTwoRule {
  float inverse;
  __device__ float scale_of(float amax) const { return (amax * inverse) * (1.0f / 6.0f); }
  __device__ float factor(float) const { return inverse; }
  __device__ float boundary_scale(float v) const { return v; }
};
struct CompatRule {
  float encode;  // 1 / input_scale
  __device__ float scale_of(float amax) const { return encode * (amax * (1.0f / 6.0f)); }
  __device__ float factor(float v) const { return 1.0f / (v * (1.0f / encode)); }
  __device__ float boundary_scale(float) const { return 1.0f; }
};

// Only these have tensor cores for FP4; for others that branch is not compiled.
#if __CUDA_ARCH__ >= 1000
inline constexpr bool kHasFp4Operands = true;
#else
inline constexpr bool kHasFp4Operands = false;
#endif

// Where the operand of a row goes, by vec8.
struct OperandRow {
  std::byte* row;
  int64_t fp4_vec8s;  // padding included; 0: bf16
  __device__ OperandRow(const RowArgs& args, int64_t index) : row(args.operand), fp4_vec8s(0) {
    if (kHasFp4Operands && args.fp4_operand) {
      fp4_vec8s = fp4_row_vec8s(args.k);
      row += index * fp4_row_bytes(args.k);
    } else {
      row += index * (args.k * 2);
    }
  }
  // Whether a vec8 beyond the row's elements is there.
  __device__ bool pads(int64_t i) const { return kHasFp4Operands && i < fp4_vec8s; }
  __device__ void put(int64_t i, const Vec8& vec8) const {
    if (kHasFp4Operands && fp4_vec8s != 0) {
      *reinterpret_cast<uint32_t*>(row + fp4_codes_offset(i)) = vec8.codes;
      if (i % 2 == 0) row[fp4_scale_offset(i)] = static_cast<std::byte>(vec8.scale);
    } else {
      reinterpret_cast<uint4*>(row)[i] = vec8.operand;
    }
  }
};

struct BlockCounts {
  unsigned saturated = 0, zeroed = 0;
};

template <class Rule>
__device__ void quantize_block(const float (&x)[kBlock], const Rule& rule, const RowArgs& args, int64_t row,
                               int64_t block, BlockCounts& counts) {
  uint32_t amax_bits = 0;
#pragma unroll
  for (float value : x) amax_bits = max(amax_bits, magnitude_bits(value));
  const float scale = rule.scale_of(__uint_as_float(amax_bits));
  const uint32_t byte = e4m3_from_float(scale);
  const float v = e4m3_to_float(byte);
  const float factor = rule.factor(v);
  const E2m1Boundaries boundaries(rule.boundary_scale(v));
  uint32_t codes[2] = {}, operand[kBlock / 2] = {};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t code = byte == 0 ? 0 : boundaries.code(x[i] * factor);
    codes[i / 8] |= code << i % 8 * 4;
    operand[i / 2] |= uint32_t{bf16_from_float(e2m1_to_float(code) * v)} << i % 2 * 16;
  }
  counts.saturated += scale > 448;
  counts.zeroed += byte == 0 && amax_bits != 0;
  if (args.out.codes != nullptr) {
    args.out.block_scales[row * (args.k / kBlock) + block] = static_cast<uint8_t>(byte);
    *reinterpret_cast<uint2*>(args.out.codes + row * (args.k / 2) + block * 8) = make_uint2(codes[0], codes[1]);
  }
  const OperandRow to(args, row);
  to.put(block * 2, {codes[0], make_uint4(operand[0], operand[1], operand[2], operand[3]), byte, false, false});
  to.put(block * 2 + 1, {codes[1], make_uint4(operand[4], operand[5], operand[6], operand[7]), byte, false, false});
}

// What lies behind a row of FP4: code 0 under scale 0.
__device__ inline void pad_row(const RowArgs& args, const OperandRow& operand, ThreadGroup group) {
  for (int64_t i = args.k / 8 + group.rank; operand.pads(i); i += group.size) operand.put(i, Vec8{});
}

template <DType kType, class Rule>
__device__ void quantize_blocks(const RowArgs& args, int64_t row, const Rule& rule) {
  BlockCounts counts;
  for (int64_t block = threadIdx.x; block < args.k / kBlock; block += blockDim.x) {
    float x[kBlock];
    load_elements<kType>(args.x, row * args.k + block * kBlock, x);
    quantize_block(x, rule, args, row, block, counts);
  }
  pad_row(args, OperandRow(args, row), ThreadGroup::cta());
  __syncwarp();
  add(args.counters.saturated, counts.saturated);
  add(args.counters.zeroed, counts.zeroed);
}

// kCodes: whether codes and block scales are wanted beside the operand.
template <bool kCodes, class Operand>
__device__ void quantize_vec8s(const RowArgs& args, int64_t row, uint4 x, float inverse, const Operand& operand,
                               ThreadGroup group) {
  const int64_t vec8s = args.k / 8;
  BlockCounts counts;
#pragma unroll 1
  for (int64_t first = 0; first < vec8s; first += group.size) {  // whole warps
    const int64_t i = first + group.rank, at = row * vec8s + i;
    const uint4 next = load_vec8(args, row, i + group.size);
    const Vec8 vec8 = quantize_vec8(x, inverse);
    x = next;
    if (i >= vec8s) {  // whole warps, and so a whole k-block of FP4
      if (operand.pads(i)) operand.put(i, Vec8{});
      continue;
    }
    operand.put(i, vec8);
    if constexpr (kCodes) {
      reinterpret_cast<uint32_t*>(args.out.codes)[at] = vec8.codes;
      if (i % 2 == 0) args.out.block_scales[at / 2] = static_cast<uint8_t>(vec8.scale);
    }
    counts.saturated += i % 2 == 0 && vec8.saturated;
    counts.zeroed += i % 2 == 0 && vec8.zeroed;
  }
  __syncwarp();
  add(args.counters.saturated, counts.saturated);
  add(args.counters.zeroed, counts.zeroed);
}

__device__ inline void count_once(uint64_t* counter, uint64_t value, ThreadGroup group) {
  if (group.rank == 0) atomicAdd(reinterpret_cast<unsigned long long*>(counter), value);
}

// What a row's largest magnitude decides: its scale, or that the row is nonfinite, for which it returns false.
template <class Operand>
__device__ bool begin_row(const RowArgs& args, int64_t row, uint32_t amax, const Operand& operand, ThreadGroup group) {
  if (amax < kInfBits) {
    if (args.row_count == nullptr) count_once(args.counters.blocks, static_cast<uint64_t>(args.k / kBlock), group);
    if (group.rank == 0) args.out.row_scale[row] = args.rule.scale_of(amax);
    return true;
  }
  if (group.rank == 0) {
    args.out.nonfinite[row] = 1;
    args.out.row_scale[row] = __uint_as_float(0x7FC00000u);
  }
  if (args.out.codes != nullptr) {
    for (int64_t i = group.rank; i < args.k / 2; i += group.size) args.out.codes[row * (args.k / 2) + i] = 0;
    for (int64_t i = group.rank; i < args.k / kBlock; i += group.size)
      args.out.block_scales[row * (args.k / kBlock) + i] = 0;
  }
  for (int64_t i = group.rank; i < args.k / 8 || operand.pads(i); i += group.size) operand.put(i, Vec8{});
  count_once(args.counters.nonfinite, 1, group);
  if (args.row_count != nullptr) count_once(args.counters.blocks, 0 - static_cast<uint64_t>(args.k / kBlock), group);
  return false;
}

// What can be written of a row before it is read.
__device__ inline void expect_row(const RowArgs& args, int64_t row, bool has_row, ThreadGroup group) {
  if (group.rank == 0 && (has_row || args.row_count == nullptr)) args.out.nonfinite[row] = 0;
  // Blocks of all rows are counted at once, less those of nonfinite rows, since one atomic a row would be serialized.
  if (args.row_count != nullptr && row == 0)
    count_once(args.counters.blocks, static_cast<uint64_t>(*args.row_count * (args.k / kBlock)), group);
}

// The row of a CTA, to NVFP4.
template <DType kType>
__device__ void quantize_row(const RowArgs& args, int64_t row, bool has_row) {
  expect_row(args, row, has_row, ThreadGroup::cta());
  if (!has_row) return;
  const uint32_t amax = row_magnitude<kType>(args, row * args.k);
  if (!begin_row(args, row, amax, OperandRow(args, row), ThreadGroup::cta())) return;
  if (args.policy == RowScalePolicy::kCompat)
    quantize_blocks<kType>(args, row, CompatRule{args.rule.inverse});
  else
    quantize_blocks<kType>(args, row, PowerOfTwoRule{args.rule.inverse_of(amax)});
}
template <class Operand>
__device__ void quantize_scaled_vec8_row(const RowArgs& args, int64_t row, uint32_t amax, const uint4& first,
                                         const Operand& operand, ThreadGroup group) {
  if (!begin_row(args, row, amax, operand, group)) return;
  const float inverse = args.rule.inverse_of(amax);
  if (args.out.codes != nullptr)
    quantize_vec8s<true>(args, row, first, inverse, operand, group);
  else
    quantize_vec8s<false>(args, row, first, inverse, operand, group);
}
// The same by vec8, for a row that is known to be wanted; first: the thread's first vec8.
template <class Operand>
__device__ void quantize_vec8_row(const RowArgs& args, int64_t row, const uint4& first, const Operand& operand) {
  const ThreadGroup group = ThreadGroup::cta();
  expect_row(args, row, true, group);
  const uint32_t amax = cta_magnitude(vec8_magnitude(args, row, first, group));
  quantize_scaled_vec8_row(args, row, amax, first, operand, group);
}
__device__ inline void quantize_vec8_row(const RowArgs& args, int64_t row, const uint4& first) {
  quantize_vec8_row(args, row, first, OperandRow(args, row));
}
// The same by a warp.
template <class Operand>
__device__ void quantize_vec8_row_by_warp(const RowArgs& args, int64_t row, const uint4& first,
                                          const Operand& operand) {
  const ThreadGroup group = ThreadGroup::warp();
  expect_row(args, row, true, group);
  const uint32_t amax = __reduce_max_sync(0xFFFFFFFFu, vec8_magnitude(args, row, first, group));
  quantize_scaled_vec8_row(args, row, amax, first, operand, group);
}

// The row of a CTA, of hidden, rounded to bf16 for the tensor cores, and whether it is nonfinite.
template <DType kType>
__device__ void round_row(const RowArgs& args, int64_t row, bool has_row) {
  if (threadIdx.x == 0) args.out.nonfinite[row] = 0;
  if (!has_row) return;
  uint32_t magnitude = 0;
  for (int64_t i = threadIdx.x * kBlock; i < args.k; i += blockDim.x * kBlock) {
    float x[kBlock];
    load_elements<kType>(args.x, row * args.k + i, x);
    uint32_t words[kBlock / 2];
#pragma unroll
    for (int j = 0; j < kBlock / 2; ++j) {
      magnitude = max(magnitude, max(magnitude_bits(x[2 * j]), magnitude_bits(x[2 * j + 1])));
      words[j] = uint32_t{bf16_from_float(x[2 * j])} | uint32_t{bf16_from_float(x[2 * j + 1])} << 16;
    }
    auto* const to = reinterpret_cast<uint4*>(args.out.bf16 + row * args.k + i);
    to[0] = make_uint4(words[0], words[1], words[2], words[3]);
    to[1] = make_uint4(words[4], words[5], words[6], words[7]);
  }
  if (!__syncthreads_or(magnitude >= kInfBits)) return;
  if (threadIdx.x == 0) args.out.nonfinite[row] = 1;
  count_once(args.counters.nonfinite, 1, ThreadGroup::cta());
}

// The arguments of quantize: all tokens of hidden, counted in the run's status. part: whose hidden.
inline RowArgs hidden_args(const StepContext& step, const PartBuffers& part) {
  const MoeConfig& config = step.weights.config;
  RunStatus& status = *step.buffers.status;
  const bool weighed = step.plan->weighs_hidden && &part == &step.buffers.routed;
  const Scratch scratch(step);
  RowArgs args{};
  args.x = weighed ? step.buffers.weighted_hidden : step.batch.hidden;
  args.k = config->hidden_size;
  args.policy = config->activation_scale == ActivationScale::kDynamicToken ? RowScalePolicy::kDynamic
                : config->activation_scale == ActivationScale::kCompat     ? RowScalePolicy::kCompat
                                                                           : RowScalePolicy::kPowerOfTwo;
  args.rule = RowScaleRule(args.policy, resolve_activation_scales(config, step.weights.scales)->hidden);
  args.out = part.hidden;
  args.operand = &part == &step.buffers.routed ? scratch.hidden_operand : scratch.shared_hidden_operand;
  args.fp4_operand = step.plan->fp4_operands;
  args.counters = {&status.nonfinite_tokens, &status.hidden_blocks, &status.hidden_saturated, &status.hidden_zeroed};
  // A token counts once: by the shared expert's hidden, and by `weigh` what that does not see.
  if (weighed && step.buffers.shared.experts > 0) args.counters.nonfinite = scratch.discarded_count;
  return args;
}

}  // namespace nvfp4_moe::cuda
