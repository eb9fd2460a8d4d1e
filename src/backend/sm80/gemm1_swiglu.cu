// gemm1_swiglu on mma.sync.
#include "backend/cuda/steps/steps.h"
#include "backend/sm80/gemm1_swiglu.cuh"
#include "backend/sm80/mma_tile.cuh"

namespace nvfp4_moe::cuda {

void gemm1_swiglu(const StepContext& step, const PartBuffers& part) {
  launch_gemm1_swiglu<MmaTile<kSmallTileRows>, MmaTile<kLargeTileRows>>(step, part);
}

}  // namespace nvfp4_moe::cuda
