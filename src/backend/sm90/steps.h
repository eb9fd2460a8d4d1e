// The steps of the layer that Hopper does in its own way; the others are those of backend/cuda/steps.h.
#pragma once

#include "backend/cuda/steps.h"
#include "backend/host_layer.h"

namespace nvfp4_moe::sm90 {

cuda::Tiling tiling(const HostCall& call);
void route(const HostCall& call);
void gemm1_swiglu(const HostCall& call, const HostPart& part);
// The walk's, of what quantize_into_rows leaves.
void gemm1_swiglu_of_rows(const HostCall& call, const HostPart& part);
void gemm2(const HostCall& call, const HostPart& part);

}  // namespace nvfp4_moe::sm90
