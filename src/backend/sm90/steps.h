// The steps of the layer that have their own implementation on Hopper; the others are in
// backend/cuda/steps/steps.h.
#pragma once

#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::sm90 {

// Writes hidden in expert order, if step.plan->hidden.into_rows (gather.cu).
Status quantize_into_rows(const StepContext& step);
Status gemm1_swiglu(const StepContext& step, const PartBuffers& part);
Status gemm2(const StepContext& step, const PartBuffers& part);

}  // namespace nvfp4_moe::internal::sm90
