// The steps that have their own implementation on this architecture, for nvfp4 and for bf16
// activations; the others are in backend/cuda/steps/steps.h.
#pragma once

#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::sm100 {

Status gemm1_swiglu(const StepContext& step, const PartBuffers& part);
Status gemm2(const StepContext& step, const PartBuffers& part);
Status bf16_gemm1_swiglu(const StepContext& step, const PartBuffers& part);
Status bf16_gemm2(const StepContext& step, const PartBuffers& part);

}  // namespace nvfp4_moe::internal::sm100
