// gemm2 on wgmma.
#include "backend/cuda/gemm2.cuh"
#include "backend/sm90/steps.h"
#include "backend/sm90/wgmma_tile.cuh"

namespace nvfp4_moe::sm90 {

void gemm2(const HostCall& call, const HostPart& part) {
  cuda::launch_gemm2<WgmmaTile<cuda::kSmallTileRows>, WgmmaTile<cuda::kLargeTileRows>>(call, part);
}

}  // namespace nvfp4_moe::sm90
