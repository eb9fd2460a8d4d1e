// The steps that Hopper has its own kernels for; the others are backend/cuda's.
#pragma once

#include "backend/host_layer.h"

namespace nvfp4_moe::sm90 {

void gemm1_swiglu(const HostCall& call, const HostPart& part);
void gemm2(const HostCall& call, const HostPart& part);

}  // namespace nvfp4_moe::sm90
