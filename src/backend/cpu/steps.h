// The steps of the layer (backend/layer_steps.h lists the arrays of each), each in its own file.
//
// A GEMM reads operands (kernels.h), which are made from its input once per call: by the step
// itself or, if the whole layer runs, by the preceding quantization while the row is still in a
// cache (LayerScratch*, Operands* not null).
#pragma once

#include <atomic>

#include "backend/cpu/gemm.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/scratch.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::cpu {

void route(const StepContext& step);
void quantize(const StepContext& step, const Kernels& kernels, const LayerScratch* scratch);
void multiply_gate_up(const StepContext& step, const PartBuffers& part, const Kernels& kernels,
                      const LayerScratch& scratch);
void requantize(const StepContext& step, const PartBuffers& part, const Kernels& kernels,
                const Operands* operands);
void multiply_down(const StepContext& step, const PartBuffers& part, const Kernels& kernels,
                   const LayerScratch& scratch);
void combine(const StepContext& step, const Kernels& kernels);

// Makes the operands of hidden and of the intermediate from their arrays.
void hidden_operands(const StepContext& step, const Kernels& kernels, const LayerScratch& scratch);
void intermediate_operands(const StepContext& step, const PartBuffers& part, const Kernels& kernels,
                           const Operands& operands);

// Adds a thread's count to the run's status.
inline void add_count(uint64_t& counter, uint64_t value) {
  if (value != 0) std::atomic_ref<uint64_t>(counter).fetch_add(value, std::memory_order_relaxed);
}

// Calls body(expert, begin, end) for ranges of strips of every expert that has rows, in parallel.
template <class Body>
void for_each_strip(const StepContext& step, const PartBuffers& part, int64_t strips,
                    int32_t* active_experts, const Body& body) {
  int64_t active = 0;
  for (int64_t e = 0; e < part.experts; ++e)
    if (part.row_offsets[e] < part.row_offsets[e + 1])
      active_experts[active++] = static_cast<int32_t>(e);
  const int64_t least = active == 0 ? 1 : least_strips(part.row_offsets[part.experts] / active);
  for_ranges(step.executor, active * strips, least, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t run = std::min(end, (i / strips + 1) * strips);
      body(int64_t{active_experts[i / strips]}, i % strips, i % strips + (run - i));
      i = run;
    }
  });
}

// The packed bytes, tensor scales, fp8 shifts and biases of a part's expert; the shared expert has
// no biases.
const uint8_t* expert_bytes(const PackedWeights& weights, const PartBuffers& part, int64_t expert);
const TensorScales& expert_scales(const PackedWeights& weights, const PartBuffers& part,
                                  int64_t expert);
Fp8ExpertWeights expert_fp8(const PackedWeights& weights, const PartBuffers& part, int64_t expert);
ExpertBiases expert_biases(const PackedWeights& weights, const PartBuffers& part, int64_t expert);

}  // namespace nvfp4_moe::internal::cpu
