// The launches of this backend's GEMMs (backend/cuda/fp4/gemm_launch.cuh).
#pragma once

#include "backend/cuda/fp4/gemm_launch.cuh"
#include "backend/sm120/config.h"
#include "backend/sm120/gemm.cuh"

namespace nvfp4_moe::internal::sm120 {

using Room = cuda::fp4::GemmRoom<true, Scratch, kGemmConfigs, GemmTraits, Shared>;

}  // namespace nvfp4_moe::internal::sm120
