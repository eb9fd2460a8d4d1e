// The steps of the layer that Hopper does in its own way; the others are those of backend/cuda/steps/steps.h.
#pragma once

#include "backend/cuda/steps/steps.h"
#include "backend/layer_steps.h"

namespace nvfp4_moe::sm90 {

cuda::Tiling tiling(const HostCall& call);
void route(const HostCall& call);
void gemm1_swiglu(const HostCall& call, const HostPart& part);
// The walk's: of what quantize_into_rows leaves, or right after route_and_quantize.
void gemm1_swiglu_in_walk(const HostCall& call, const HostPart& part);
void gemm2(const HostCall& call, const HostPart& part);

}  // namespace nvfp4_moe::sm90
