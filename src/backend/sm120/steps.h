// The steps that have their own implementation on this architecture, for nvfp4 activations; the
// others are in backend/cuda/steps/steps.h.
#pragma once

#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::sm120 {

Status gemm1_swiglu(const StepContext& step, const PartBuffers& part);
Status gemm2(const StepContext& step, const PartBuffers& part);

}  // namespace nvfp4_moe::internal::sm120
