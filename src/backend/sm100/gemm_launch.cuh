// The launches of this backend's GEMMs (backend/cuda/fp4/gemm_launch.cuh).
#pragma once

#include "backend/cuda/fp4/gemm_launch.cuh"
#include "backend/sm100/bf16_gemm.cuh"
#include "backend/sm100/config.h"
#include "backend/sm100/gemm.cuh"

namespace nvfp4_moe::internal::sm100 {

using Room = cuda::fp4::GemmRoom<true, Scratch, kGemmConfigs, GemmTraits, Shared>;
using Bf16Room = cuda::fp4::GemmRoom<false, Scratch, kBf16GemmConfigs, Bf16Traits, Bf16Shared>;

}  // namespace nvfp4_moe::internal::sm100
