// gemm1_swiglu on wgmma.
#include "backend/cuda/gemm1_swiglu.cuh"
#include "backend/sm90/steps.h"
#include "backend/sm90/wgmma_tile.cuh"

namespace nvfp4_moe::sm90 {

void gemm1_swiglu(const HostCall& call, const HostPart& part) {
  cuda::launch_gemm1_swiglu<WgmmaTile<cuda::kSmallTileRows>, WgmmaTile<cuda::kLargeTileRows>>(call, part);
}

}  // namespace nvfp4_moe::sm90
