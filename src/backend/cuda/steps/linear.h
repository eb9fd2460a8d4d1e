// A dense linear (F18) on a GPU: quantize, then the backend's gemm2 over one matrix.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/steps/steps.h"

namespace nvfp4_moe::cuda {

// What a backend brings to it.
struct LinearSteps {
  void (*gemm2)(const StepContext& step, const PartBuffers& part);
  Tiling (*tiling)(const StepContext& step);  // names the counters that gemm2 wants cleared
  void (*take_scratch)(const MoeConfig& config, const ExpertRange& range, int64_t tokens, Arena& arena);
};

size_t linear_bytes(int64_t rows, int64_t cols);
Status linear_pack(LinearWeights& weights, const Nvfp4View& source);
size_t linear_workspace_bytes(const LinearSteps& steps, const LinearWeights& weights, int64_t max_tokens);
Status linear_run(const LinearSteps& steps, const LinearWeights& weights, const LinearBatch& batch,
                  std::byte* workspace, const RunContext& context);

}  // namespace nvfp4_moe::cuda
