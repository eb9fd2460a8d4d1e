// gemm1_swiglu on mma.sync.
#include "backend/cuda/gemm1_swiglu.cuh"
#include "backend/cuda/mma_tile.cuh"
#include "backend/cuda/steps.h"

namespace nvfp4_moe::cuda {

void gemm1_swiglu(const HostCall& call, const HostPart& part) {
  launch_gemm1_swiglu<MmaTile<kSmallTileRows>, MmaTile<kLargeTileRows>>(call, part);
}

}  // namespace nvfp4_moe::cuda
