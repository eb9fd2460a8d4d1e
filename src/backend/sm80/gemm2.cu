// gemm2 on mma.sync.
#include "backend/cuda/steps/steps.h"
#include "backend/sm80/gemm2.cuh"
#include "backend/sm80/mma_tile.cuh"

namespace nvfp4_moe::cuda {

void gemm2(const StepContext& step, const PartBuffers& part) {
  launch_gemm2<MmaTile<kSmallTileRows>, MmaTile<kLargeTileRows>>(step, part);
}

}  // namespace nvfp4_moe::cuda
