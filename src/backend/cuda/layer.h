// A layer on a GPU, whatever its GEMMs are: what it takes, its plan, and its walk through the steps.
#pragma once

#include "backend/backend.h"
#include "backend/host_layer.h"

namespace nvfp4_moe::cuda {

extern const DeviceMemory kMemory;

// What every GPU backend takes and declines, apart from the architecture.
Status supports_config(const MoeConfig& config);
Status supports_device(const DeviceFacts& device);  // a CUDA device of sm_80 or later

// w4a4_gemm, w4a16_gemm: names of the GEMM kernels.
Result<Plan> make_plan(const char* backend, const char* w4a4_gemm, const char* w4a16_gemm, const MoeConfig& config,
                       const ExpertRange& range, const LayerScales& scales, const Limits& limits);
// Enqueues the steps in context.stream.
Status run_layer(const HostSteps& steps, const PackedWeights& weights, const Plan& plan, const Batch& batch,
                 const Workspace& workspace, const RunContext& context);

}  // namespace nvfp4_moe::cuda
