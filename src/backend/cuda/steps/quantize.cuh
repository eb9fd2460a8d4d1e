// quantize and requantize: convert rows of activations to GEMM operands.
//
//   nvfp4   codes (rows, K/2), block scales (rows, K/16), row scales (rows), and the operand (rows,
//           K): e2m1 * e4m3 in bf16, exact, for tensor cores without FP4; for those with FP4 the
//           codes and scales in another order (fp4_operand.h)
//   fp8     E4M3 codes (rows, K), row scales (rows), and the operand: their values in bf16, or the
//           codes in another order (fp8_operand.h)
//   bf16    hidden rounded once; the intermediate is bf16 already, so only its nonfinite rows are
//           counted
//
// Rows are tokens in quantize, and rows in expert order in requantize. A CTA takes a row. A bf16
// row whose scale is a power of two is processed by vec8 (quantize_vec8.cuh, quantize_e4m3.cuh),
// and read only once if the CTA has enough threads. The formulas, in this order of fp32 operations,
// are in docs/explanation/numerics.md section 3 and docs/explanation/format.md. A nonfinite row
// gets flag 1, zero codes, scales and operands, and a NaN row scale. Tokens without a row in expert
// order are not read: their arrays stay unchanged, with flag 0. Counters are integers, so their
// order does not matter.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/quantize_args.cuh"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::cuda {

// The NVFP4 rules give a factor for an element's magnitude, and a factor for the boundaries between
// e2m1 values to compare it with. The formula for a power of two is e2m1(x * inverse / v). A
// boundary t times v is exact, so comparing with it decides as the rounded quotient does: floats
// near t v differ from it by at least 2^-24 of it, and their quotients by v are further from t than
// rounding reaches.
struct PowerOfTwoRule {
  float inverse;
  __device__ float scale_of(float amax) const { return (amax * inverse) * (1.0f / 6.0f); }
  __device__ float factor(float) const { return inverse; }
  __device__ float boundary_scale(float v) const { return v; }
};
struct VllmOrderRule {
  float encode;  // 1 / input_scale
  __device__ float scale_of(float amax) const { return encode * (amax * (1.0f / 6.0f)); }
  __device__ float factor(float v) const { return 1.0f / (v * (1.0f / encode)); }
  __device__ float boundary_scale(float) const { return 1.0f; }
};

// E4M3 has no block scales.
struct E4m3Rule {
  float inverse;
};

struct BlockCounts {
  unsigned saturated = 0, zeroed = 0;
};

template <class Rule>
__device__ void quantize_block(const float (&x)[kBlock], const Rule& rule, const RowArgs& args,
                               int64_t row, int64_t block, BlockCounts& counts) {
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
  const OperandRow<Vec8> to(args, row);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t* const values = operand + half * 4;
    const Vec8 vec8{codes[half], make_uint4(values[0], values[1], values[2], values[3]), byte,
                    false, false};
    to.put(block * 2 + half, vec8);
    if (wants_codes(args)) put_codes(args, row, block * 2 + half, vec8);
  }
}

// The same for E4M3.
__device__ inline void quantize_block(const float (&x)[kBlock], const E4m3Rule& rule,
                                      const RowArgs& args, int64_t row, int64_t block,
                                      BlockCounts& counts) {
  uint32_t amax = 0;
#pragma unroll
  for (float value : x) amax = max(amax, magnitude_bits(value));
  const OperandRow<E4m3Vec8> to(args, row);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float vec[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) vec[i] = x[half * 8 + i];
    const E4m3Vec8 vec8 = E4m3Vec8::of(vec, rule.inverse, amax);
    to.put(block * 2 + half, vec8);
    if (wants_codes(args)) put_codes(args, row, block * 2 + half, vec8);
    counts.saturated += half == 0 && vec8.saturated;
    counts.zeroed += half == 0 && vec8.zeroed;
  }
}

template <DType kType, class Vec, class Rule>
__device__ void quantize_blocks(const RowArgs& args, int64_t row, const Rule& rule) {
  BlockCounts counts;
  for (int64_t block = threadIdx.x; block < args.k / kBlock; block += blockDim.x) {
    float x[kBlock];
    load_elements<kType>(args.x, row * args.k + block * kBlock, x);
    quantize_block(x, rule, args, row, block, counts);
  }
  const OperandRow<Vec> operand(args, row);
  for (int64_t i = args.k / 8 + threadIdx.x; operand.pads(i); i += blockDim.x)
    operand.put(i, Vec{});
  __syncwarp();
  add(args.counters.saturated, counts.saturated);
  add(args.counters.zeroed, counts.zeroed);
}

// kCodes: whether codes and block scales are needed in addition to the operand.
template <class Vec, bool kCodes, class OperandTo>
__device__ void quantize_vec8s(const RowArgs& args, int64_t row, uint4 x, float inverse,
                               const OperandTo& operand, ThreadGroup group) {
  const int64_t vec8s = args.k / 8;
  BlockCounts counts;
#pragma unroll 1
  for (int64_t first = 0; first < vec8s; first += group.size) {  // whole warps
    const int64_t i = first + group.rank;
    const uint4 next = load_vec8(args, row, i + group.size);
    const Vec vec8 = Vec::of(x, inverse);
    x = next;
    if (i >= vec8s) {  // whole warps, and so a whole k-block of FP4 or E4M3
      if (operand.pads(i)) operand.put(i, Vec{});
      continue;
    }
    operand.put(i, vec8);
    if constexpr (kCodes) put_codes(args, row, i, vec8);
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

// Decides from a row's largest magnitude: stores the row's scale and returns true, or flags a
// nonfinite row and returns false.
template <class Vec, class OperandTo>
__device__ bool begin_row(const RowArgs& args, int64_t row, uint32_t amax, const OperandTo& operand,
                          ThreadGroup group) {
  if (amax < kInfBits) {
    if (args.row_count == nullptr)
      count_once(args.counters.blocks, static_cast<uint64_t>(args.k / kBlock), group);
    if (group.rank == 0) args.out.row_scale[row] = args.rule.scale_of(amax);
    return true;
  }
  if (group.rank == 0) {
    args.out.nonfinite[row] = 1;
    args.out.row_scale[row] = __uint_as_float(0x7FC00000u);
  }
  if (wants_codes(args))
    for (int64_t i = group.rank; i < args.k / 8; i += group.size) put_codes(args, row, i, Vec{});
  for (int64_t i = group.rank; i < args.k / 8 || operand.pads(i); i += group.size)
    operand.put(i, Vec{});
  count_once(args.counters.nonfinite, 1, group);
  if (args.row_count != nullptr)
    count_once(args.counters.blocks, 0 - static_cast<uint64_t>(args.k / kBlock), group);
  return false;
}

// Writes the parts of a row that do not depend on its values.
__device__ inline void expect_row(const RowArgs& args, int64_t row, bool has_row,
                                  ThreadGroup group) {
  if (group.rank == 0 && (has_row || args.row_count == nullptr)) args.out.nonfinite[row] = 0;
  // Counts the blocks of all rows at once, since one atomic per row would serialize. begin_row
  // subtracts those of nonfinite rows.
  if (args.row_count != nullptr && row == 0)
    count_once(args.counters.blocks, static_cast<uint64_t>(*args.row_count * (args.k / kBlock)),
               group);
}

// Quantizes the row of a CTA to NVFP4 or E4M3.
template <DType kType, class Vec>
__device__ void quantize_row(const RowArgs& args, int64_t row, bool has_row) {
  expect_row(args, row, has_row, ThreadGroup::cta());
  if (!has_row) return;
  const uint32_t amax = row_magnitude<kType>(args, row * args.k);
  if (!begin_row<Vec>(args, row, amax, OperandRow<Vec>(args, row), ThreadGroup::cta())) return;
  if constexpr (std::is_same_v<Vec, E4m3Vec8>)
    quantize_blocks<kType, Vec>(args, row, E4m3Rule{args.rule.inverse_of(amax)});
  else if (args.policy == RowScalePolicy::kVllmOrder)
    quantize_blocks<kType, Vec>(args, row, VllmOrderRule{args.rule.inverse});
  else
    quantize_blocks<kType, Vec>(args, row, PowerOfTwoRule{args.rule.inverse_of(amax)});
}
template <class Vec, class OperandTo>
__device__ void quantize_scaled_vec8_row(const RowArgs& args, int64_t row, uint32_t amax,
                                         const uint4& first, const OperandTo& operand,
                                         ThreadGroup group) {
  if (!begin_row<Vec>(args, row, amax, operand, group)) return;
  const float inverse = args.rule.inverse_of(amax);
  if (wants_codes(args))
    quantize_vec8s<Vec, true>(args, row, first, inverse, operand, group);
  else
    quantize_vec8s<Vec, false>(args, row, first, inverse, operand, group);
}
// The same by vec8, for a row that is needed; first: the thread's first vec8.
template <class Vec, class OperandTo>
__device__ void quantize_vec8_row(const RowArgs& args, int64_t row, const uint4& first,
                                  const OperandTo& operand) {
  const ThreadGroup group = ThreadGroup::cta();
  expect_row(args, row, true, group);
  const uint32_t amax = cta_magnitude(vec8_magnitude(args, row, first, group));
  quantize_scaled_vec8_row<Vec>(args, row, amax, first, operand, group);
}
template <class Vec>
__device__ void quantize_vec8_row(const RowArgs& args, int64_t row, const uint4& first) {
  quantize_vec8_row<Vec>(args, row, first, OperandRow<Vec>(args, row));
}
// The same by a warp.
template <class Vec, class OperandTo>
__device__ void quantize_vec8_row_by_warp(const RowArgs& args, int64_t row, const uint4& first,
                                          const OperandTo& operand) {
  const ThreadGroup group = ThreadGroup::warp();
  expect_row(args, row, true, group);
  const uint32_t amax = __reduce_max_sync(0xFFFFFFFFu, vec8_magnitude(args, row, first, group));
  quantize_scaled_vec8_row<Vec>(args, row, amax, first, operand, group);
}

// Rounds a CTA's row of hidden to bf16 for the tensor cores, and flags it if it is nonfinite.
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
      words[j] = uint32_t{bf16_from_float(x[2 * j])} | uint32_t{bf16_from_float(x[2 * j + 1])}
                                                           << 16;
    }
    auto* const to = reinterpret_cast<uint4*>(args.out.bf16 + row * args.k + i);
    to[0] = make_uint4(words[0], words[1], words[2], words[3]);
    to[1] = make_uint4(words[4], words[5], words[6], words[7]);
  }
  if (!__syncthreads_or(magnitude >= kInfBits)) return;
  if (threadIdx.x == 0) args.out.nonfinite[row] = 1;
  count_once(args.counters.nonfinite, 1, ThreadGroup::cta());
}

// Whether rows are quantized to fp8, not NVFP4.
inline bool is_fp8(const StepContext& step) {
  return step.weights.config->activation_format == ActivationFormat::kFp8;
}

// The arguments of quantize: all tokens of hidden, counted in the run's status. part: whose hidden.
inline RowArgs hidden_args(const StepContext& step, const PartBuffers& part) {
  const MoeConfig& config = step.weights.config;
  RunStatus& status = *step.buffers.status;
  const bool scaled = step.plan->scale_hidden && &part == &step.buffers.routed;
  const Scratch scratch(step);
  RowArgs args{};
  args.x = scaled ? step.buffers.weighted_hidden : step.batch.hidden;
  args.k = config->hidden_size;
  args.policy =
      config->activation_scale == ActivationScale::kDynamicToken ? RowScalePolicy::kDynamic
      : config->activation_scale == ActivationScale::kVllmOrder  ? RowScalePolicy::kVllmOrder
                                                                 : RowScalePolicy::kPowerOfTwo;
  args.rule = RowScaleRule(args.policy, config->activation_format,
                           resolve_activation_scales(config, step.weights.scales)->hidden);
  args.out = part.hidden;
  args.operand =
      &part == &step.buffers.routed ? scratch.hidden_operand : scratch.shared_hidden_operand;
  args.operand_kind = step.plan->operand;
  args.counters = {&status.nonfinite_tokens, &status.hidden_blocks, &status.hidden_saturated,
                   &status.hidden_zeroed};
  // A token counts once: through the shared expert's hidden, and in `scale_hidden` for tokens that
  // this misses.
  if (scaled && step.buffers.shared.experts > 0) args.counters.nonfinite = scratch.discarded_count;
  return args;
}

// The same for requantize: the rows of a part's intermediate.
inline RowArgs intermediate_args(const StepContext& step, const PartBuffers& part) {
  const MoeConfig& config = step.weights.config;
  RunStatus& status = *step.buffers.status;
  const Scratch scratch(step);
  RowArgs args{};
  args.x = part.intermediate.bf16;
  args.k = part.intermediate_size;
  args.policy =
      config->intermediate_scale == IntermediateScale::kDynamicToken ? RowScalePolicy::kDynamic
      : config->intermediate_scale == IntermediateScale::kVllmOrder  ? RowScalePolicy::kVllmOrder
                                                                     : RowScalePolicy::kPowerOfTwo;
  args.rule = RowScaleRule(args.policy, config->activation_format,
                           resolve_activation_scales(config, step.weights.scales)->intermediate);
  args.out = part.intermediate;
  args.operand = &part == &step.buffers.shared ? scratch.shared_operand : scratch.routed_operand;
  args.operand_kind = step.plan->operand;
  args.counters = {&status.nonfinite_rows, &status.intermediate_blocks,
                   &status.intermediate_saturated, &status.intermediate_zeroed};
  args.row_count = part.row_offsets + part.experts;
  return args;
}

}  // namespace nvfp4_moe::internal::cuda
