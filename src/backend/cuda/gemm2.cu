// gemm2 on mma.sync.
#include "backend/cuda/gemm2.cuh"
#include "backend/cuda/mma_tile.cuh"
#include "backend/cuda/steps.h"

namespace nvfp4_moe::cuda {

void gemm2(const HostCall& call, const HostPart& part) {
  launch_gemm2<MmaTile<kSmallTileRows>, MmaTile<kLargeTileRows>>(call, part);
}

}  // namespace nvfp4_moe::cuda
