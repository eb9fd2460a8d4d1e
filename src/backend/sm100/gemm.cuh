// The grouped GEMM on tcgen05: packed weight rows times rows of activations, both used as stored,
// with accumulators in tensor memory. The caller's Epilogue turns them into outputs.
//
// One persistent cta per multiprocessor, whose warps have roles: one loads weights, four gather
// rows (producer.cuh), one multiplies (mainloop.cuh), four store (epilogue.cuh). shared.cuh has the
// barriers between them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/tcgen05.cuh"
#include "backend/sm100/epilogue.cuh"
#include "backend/sm100/mainloop.cuh"
#include "backend/sm100/producer.cuh"
#include "backend/sm100/shared.cuh"

namespace nvfp4_moe::internal::sm100 {

// Called by one thread.
template <class Traits, class Shared>
__device__ void init_barriers(Shared& shared) {
  const auto init = [](uint64_t& barrier, uint32_t arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  for (int stage = 0; stage < Shared::kStages; ++stage) {
    init(shared.full[stage], 1 + Traits::kGatherThreads);
    init(shared.empty[stage], 1);
    if constexpr (requires { shared.dequantized; })
      init(shared.dequantized[stage], Traits::kDequantizeThreads);
  }
  for (int i = 0; i < 2; ++i) {
    init(shared.rows_full[i], 1);
    init(shared.factors_full[i], Traits::kGatherThreads);
    init(shared.accumulators_full[i], 1);
    init(shared.work_empty[i], kEpilogueWarps * kArrivalsPerWarp + 1);
  }
  ptx::fence_mbarrier_init();
}

// Executed by all warps before and after their roles.
template <class Traits, class Shared>
__device__ void begin(Shared& shared, const GemmArgs& args) {
  if (args.after_route) ptx::launch_dependents();
  if (threadIdx.x == 0) init_barriers<Traits>(shared);
  if (threadIdx.x / 32 == kMmaWarp)
    ptx::tcgen05_alloc<Traits::kColumns>(ptx::shared_address(&shared.tensor_memory));
  if (!args.after_route) {  // the next kernel relies on route as soon as it starts
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
  }
  if (threadIdx.x == 0)
    shared.schedule =
        cuda::Schedule(args.schedule, cuda::count_row_tiles<Traits::kTileN>(args.row_tiles));
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
}
template <class Traits, class Shared>
__device__ void end(Shared& shared) {
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  if (threadIdx.x / 32 != kMmaWarp) return;
  ptx::tcgen05_fence_after_thread_sync();
  ptx::tcgen05_dealloc<Traits::kColumns>(shared.tensor_memory);
}

// The roles that both kinds of GEMMs share. Rows: see gather_rows. multiply: the role of the warp
// that multiplies, executed by one lane.
template <class Traits, class Rows, class Shared, class Epilogue, class Multiply>
__device__ void take_role(int warp, Shared& shared, const GemmArgs& args, const Epilogue& epilogue,
                          const Multiply& multiply) {
  if (warp < kEpilogueWarps) {
    store_tiles<Traits>(shared, args, epilogue);
  } else if (warp == kWeightsWarp) {
    load_weights<Traits>(shared, args);
  } else if (warp == kMmaWarp) {
    if (ptx::elect_one()) multiply();
    __syncwarp();
  } else {
    gather_rows<Traits, Rows>(shared, args, epilogue);
  }
}

// The kernel.
template <class Traits, class Epilogue>
__device__ void gemm(const GemmArgs& args, const Epilogue& epilogue) {
  auto& shared = sm100::shared<Traits>();
  const int warp = static_cast<int>(threadIdx.x / 32);
  begin<Traits>(shared, args);
  take_role<Traits, GatheredRows<Traits>>(warp, shared, args, epilogue,
                                          [&] { multiply<Traits>(args); });
  end<Traits>(shared);
}

}  // namespace nvfp4_moe::internal::sm100
