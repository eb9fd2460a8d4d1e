// What both dispatches do with the rows of a part: gemm1_swiglu, requantize, gemm2.
#pragma once

#include "backend/layer_steps.h"

namespace nvfp4_moe {

inline Status multiply(const LayerSteps& steps, const StepContext& step, const PartBuffers& part) {
  NVFP4_MOE_TRY(steps.gemm1_swiglu(step, part));
  NVFP4_MOE_TRY(steps.requantize(step, part));
  return steps.gemm2(step, part);
}

}  // namespace nvfp4_moe
