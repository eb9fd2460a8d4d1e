// Scratch memory of the sm90 backend, in addition to the layer's arrays.
#pragma once

#include "backend/cuda/gemm/split_k_scratch.h"
#include "backend/sm90/config.h"

namespace nvfp4_moe::internal::sm90 {

using Scratch = cuda::SplitKScratch<kMaxCtas>;

}  // namespace nvfp4_moe::internal::sm90
