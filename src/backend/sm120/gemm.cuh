// The grouped GEMM on block-scaled FP4 tensor cores: packed weight rows times rows of activations,
// both used as stored. The caller's Epilogue turns accumulators into outputs.
//
// One persistent cta per multiprocessor: a producer warp (producer.cuh) and eight consumer warps
// (mainloop.cuh, then epilogue.cuh) share a pipeline of stages of 256 k each. shared.cuh has the
// barriers between them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/sm120/epilogue.cuh"
#include "backend/sm120/mainloop.cuh"
#include "backend/sm120/producer.cuh"
#include "backend/sm120/shared.cuh"

namespace nvfp4_moe::internal::sm120 {

// Called by one thread.
template <class Traits>
__device__ void init_barriers() {
  auto& shared = sm120::shared<Traits>();
  const auto init = [](uint64_t& barrier, uint32_t arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  for (int stage = 0; stage < Shared<Traits>::kStages; ++stage) {
    init(shared.full[stage], 1);
    init(shared.empty[stage], kConsumerWarps * kArrivalsPerWarp);
  }
  for (int i = 0; i < 2; ++i) {
    init(shared.rows_full[i], 1);
    init(shared.factors_full[i], 1);
    init(shared.work_empty[i], kConsumerWarps * kArrivalsPerWarp);
  }
  ptx::fence_mbarrier_init();
}

// The role of the consumer warps.
template <class Traits, class Epilogue>
__device__ void consume(const GemmArgs& args, const Epilogue& epilogue) {
  auto& shared = sm120::shared<Traits>();
  cuda::WorkTileIterator work_tiles(shared.schedule, static_cast<int32_t>(blockIdx.x));
  PipelineState<Shared<Traits>::kStages> state;
  uint32_t index = 0;
  int32_t m_tiles[2] = {};  // of the last work tile, and of the one before
  for (cuda::WorkTile work; work_tiles.next(work); ++index) {
    m_tiles[1] = m_tiles[0];
    m_tiles[0] = work.tile.m_tile;
    ptx::mbarrier_wait(ptx::shared_address(&shared.rows_full[index % 2]), turn_parity(index));
    const cuda::TileRows rows = shared.rows[index % 2];
    Accumulators<Traits> accumulators;
    multiply<Traits>(args, work, rows.count - 1, state, accumulators);
    ptx::mbarrier_wait(ptx::shared_address(&shared.factors_full[index % 2]), turn_parity(index));
    if (work.partial < 0)
      store_tile<Traits>(epilogue, rows, shared.factors[index % 2], work.tile.m_tile, accumulators);
    else
      store_partial_tile<Traits>(args, work.partial, rows.count, accumulators);
    arrive_as_warp(shared.work_empty[index % 2]);
  }
  if (index > 0) cuda::fp4::reduce_split_tiles<Traits>(shared, args, epilogue, index - 1, m_tiles);
}

// The kernel.
template <class Traits, class Epilogue>
__device__ void gemm(const GemmArgs& args, const Epilogue& epilogue) {
  auto& shared = sm120::shared<Traits>();
  if (args.after_route) ptx::launch_dependents();
  if (threadIdx.x == 0) init_barriers<Traits>();
  if (!args.after_route) {  // the next kernel relies on route as soon as it starts
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
  }
  if (threadIdx.x == 0)
    shared.schedule =
        cuda::Schedule(args.schedule, cuda::count_row_tiles<Traits::kTileN>(args.row_tiles));
  __syncthreads();
  if (threadIdx.x >= Traits::kEpilogueThreads) {
    produce<Traits>(args, epilogue);
  } else {
    ptx::grid_dependency_wait();  // before anything is stored, and in every cta
    consume<Traits>(args, epilogue);
  }
}

}  // namespace nvfp4_moe::internal::sm120
