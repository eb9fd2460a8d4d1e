// The steps of the reference layer, in execution order, one file each, and the view of packed
// weights that they read.
#pragma once

#include "backend/layer_steps.h"
#include "backend/reference/matrix.h"
#include "core/nvfp4_view.h"

namespace nvfp4_moe::internal::reference {

void route(const StepContext& step);
void quantize(const StepContext& step);
void gemm1_swiglu(const StepContext& step, const PartBuffers& part);
void requantize(const StepContext& step, const PartBuffers& part);
void gemm2(const StepContext& step, const PartBuffers& part);
void combine(const StepContext& step);

// run.cpp: runs all steps.
Status run(const PackedWeights& weights, const Plan& plan, const Batch& batch, std::byte* workspace,
           const RunContext& context);

// pack.cpp: the checkpoint's arrays, contiguous, expert after expert.
size_t packed_bytes(const MoeConfig& config, const ExpertRange& range);
Status pack_expert(PackedWeights& weights, int64_t local_expert, const ExpertSource& source);
Status unpack_expert(const PackedWeights& weights, int64_t local_expert, const LentStaging&,
                     ExpertBuffers& out);
ExpertMatrices expert_matrices(const PackedWeights& weights, int64_t local_expert);
// The matrices of expert e of a part.
inline ExpertMatrices expert_matrices(const StepContext& step, const PartBuffers& part,
                                      int64_t expert) {
  return expert_matrices(step.weights, &part == &step.buffers.shared ? kSharedExpert : expert);
}

// The biases of expert e of a part; empty for the shared expert.
ExpertBiases expert_biases(const StepContext& step, const PartBuffers& part, int64_t expert);

// linear.cpp
size_t linear_bytes(int64_t rows, int64_t cols);
Status linear_pack(LinearWeights& weights, const Nvfp4View& source);
size_t linear_workspace_bytes(const LinearWeights& weights, int64_t max_tokens);
Status linear_run(const LinearWeights& weights, const LinearBatch& batch, std::byte* workspace,
                  const RunContext& context);

}  // namespace nvfp4_moe::internal::reference
