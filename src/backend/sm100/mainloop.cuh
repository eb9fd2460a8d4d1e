// The mainloop: one thread copies a stage's scales to tensor memory and multiplies its codes, four
// products of 64 k each, with accumulators in tensor memory. Nothing is converted, and nothing
// passes through registers.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/tcgen05.cuh"
#include "backend/sm100/shared.cuh"

namespace nvfp4_moe::internal::sm100 {

// accumulators (128 weight rows, rows) (+)= the first `tiles` tiles of the stage's k-block. kind:
// tcgen05_fp4_kind of rows.
template <class Traits>
__device__ void multiply_stage(const Stage<Traits>& stage, int tiles, int rows, uint32_t kind,
                               uint32_t tensor_memory, uint32_t accumulators, bool accumulate) {
  const uint32_t weights = ptx::shared_address(stage.weights),
                 codes = ptx::shared_address(stage.row_codes),
                 scales = ptx::shared_address(stage.row_scales);
  constexpr uint32_t kCoreRows = 8 * 16;  // bytes of eight rows of scales
#pragma unroll
  for (int step = 0; step < kBlockSteps; ++step) {
    const int tile = step / kTileSteps;
    if (tile >= tiles) break;
    const uint32_t from =
        weights +
        static_cast<uint32_t>(tile * cuda::kTileBytes + weight_scales_offset(0, step % kTileSteps));
    ptx::tcgen05_copy_scales(tensor_memory + Traits::kWeightScales + step * Traits::kAtomColumns,
                             ptx::tcgen05_descriptor(from, kCoreRows, ptx::Swizzle::kNone));
#pragma unroll
    for (int atom = 0; atom < Traits::kAtoms; ++atom)
      if (atom * kAtomRows < rows)
        ptx::tcgen05_copy_scales(
            tensor_memory + Traits::kRowScales +
                (step * Traits::kAtoms + atom) * Traits::kAtomColumns,
            ptx::tcgen05_descriptor(scales + (step * Traits::kAtoms + atom) * kAtomBytes, kCoreRows,
                                    ptx::Swizzle::kNone));
  }
#pragma unroll
  for (int step = 0; step < kBlockSteps; ++step) {
    const int tile = step / kTileSteps;
    if (tile >= tiles) break;
    const uint32_t a =
        weights + static_cast<uint32_t>(tile * cuda::kTileBytes + step % kTileSteps * kStepBytes);
    ptx::tcgen05_mma_fp4(
        accumulators, ptx::tcgen05_descriptor(a, 8 * kWeightRowBytes, ptx::Swizzle::k64B),
        ptx::tcgen05_descriptor(codes + step * kStepBytes, 8 * kRowBytes, ptx::Swizzle::k128B),
        kind, tensor_memory + Traits::kWeightScales + step * Traits::kAtomColumns,
        tensor_memory + Traits::kRowScales + step * Traits::kAtoms * Traits::kAtomColumns,
        accumulate || step > 0);
  }
}

// The role of the warp that multiplies, executed by one lane.
template <class Traits>
__device__ void multiply(const GemmArgs& args) {
  auto& shared = sm100::shared<Traits>();
  const uint32_t tensor_memory = shared.tensor_memory;
  PipelineState<Shared<Traits>::kStages> state;
  cuda::WorkTileIterator work_tiles(shared.schedule, static_cast<int32_t>(blockIdx.x));
  uint32_t index = 0;
  for (cuda::WorkTile work; work_tiles.next(work); ++index) {
    // It follows work_empty, so the accumulators are free as well.
    ptx::mbarrier_wait(ptx::shared_address(&shared.rows_full[index % 2]), turn_parity(index));
    ptx::tcgen05_fence_after_thread_sync();
    const int rows = (shared.rows[index % 2].count + 7) / 8 * 8;
    ptx::mbarrier_arrive(ptx::shared_address(&shared.work_empty[index % 2]));
    const uint32_t kind = ptx::tcgen05_fp4_kind(rows);
    const uint32_t accumulators = tensor_memory + index % 2 * Traits::kAccumulatorColumns;
#pragma unroll 1
    for (int32_t k_block = 0; k_block < work.k_blocks; ++k_block, state.advance()) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[state.stage]), state.parity);
      ptx::fence_proxy_async_shared();  // rows were written through the generic proxy
      ptx::tcgen05_fence_after_thread_sync();
      const int32_t k_tile = (work.first_k_block + k_block) * kBlockTiles;
      multiply_stage<Traits>(shared.stages[state.stage], min(kBlockTiles, args.k_tiles - k_tile),
                             rows, kind, tensor_memory, accumulators, k_block > 0);
      ptx::tcgen05_commit(ptx::shared_address(&shared.empty[state.stage]));
    }
    ptx::tcgen05_commit(ptx::shared_address(&shared.accumulators_full[index % 2]));
  }
}

}  // namespace nvfp4_moe::internal::sm100
