// A layer on a GPU, whatever its GEMMs are: what it takes, its plan, and its walk through the steps.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/steps/steps.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::cuda {

extern const DeviceMemory kMemory;

// What every GPU backend takes and declines, apart from the architecture.
Status supports_config(const MoeConfig& config);
Status supports_device(const DeviceFacts& device);  // a CUDA device of sm_80 or later

// Takes a backend's own arrays, which begin with cuda's Scratch, for a run of so many tokens.
using TakeScratch = void (*)(const MoeConfig& config, const ExpertRange& range, int64_t tokens, Arena& arena);

// gemm: the name of the GEMM kernels.
Result<Plan> make_plan(const char* backend, const std::string& gemm, TakeScratch take_scratch, const MoeConfig& config,
                       const ExpertRange& range, const LayerScales& scales, const Limits& limits,
                       const DeviceFacts& device);
// What a run of so many tokens needs.
size_t workspace_bytes(TakeScratch take_scratch, const MoeConfig& config, const ExpertRange& range, const Plan& plan,
                       int64_t tokens);
// Enqueues the layer in context.stream: the steps, or the shorter walk of steps.h with the same results.
Status run_layer(const LayerSteps& steps, Tiling (*tiling)(const StepContext&), const PackedWeights& weights,
                 const Plan& plan, const Batch& batch, std::byte* workspace, const RunContext& context);

}  // namespace nvfp4_moe::cuda
