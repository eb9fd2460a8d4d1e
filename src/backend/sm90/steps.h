// The steps of the layer that Hopper does in its own way; the others are those of backend/cuda/steps/steps.h.
#pragma once

#include "backend/cuda/steps/steps.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::sm90 {

cuda::Tiling tiling(const StepContext& step);
void route(const StepContext& step);
void gemm1_swiglu(const StepContext& step, const PartBuffers& part);
// The walk's: of what quantize_into_rows leaves, or right after route_and_quantize.
void gemm1_swiglu_in_walk(const StepContext& step, const PartBuffers& part);
void gemm2(const StepContext& step, const PartBuffers& part);

}  // namespace nvfp4_moe::sm90
