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

// gemm: the name of the GEMM kernels. scratch_bytes: of the backend's own span, which begins with cuda's Scratch.
Result<Plan> make_plan(const char* backend, const std::string& gemm, size_t scratch_bytes, const MoeConfig& config,
                       const ExpertRange& range, const LayerScales& scales, const Limits& limits);
// Enqueues the layer in context.stream: the steps, or the shorter walk of steps.h with the same results.
Status run_layer(const LayerSteps& steps, Tiling (*tiling)(const StepContext&), const PackedWeights& weights,
                 const Plan& plan, const Batch& batch, const Workspace& workspace, const RunContext& context);

}  // namespace nvfp4_moe::cuda
