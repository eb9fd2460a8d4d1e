// The grouped GEMM of Hopper: packed weight rows are wgmma's A operand, dequantized to bf16 or E4M3
// in registers, and multiplied with rows of activations in shared memory. The caller's Epilogue
// turns accumulators into outputs.
//
// One persistent cta per multiprocessor. Its warpgroups share a pipeline of stages of 128 k each: a
// producer (producer.cuh) and two or four consumers (mainloop.cuh, then epilogue.cuh or
// split_k.cuh). shared.cuh has the barriers between them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/ptx/setmaxnreg.cuh"
#include "backend/sm90/epilogue.cuh"
#include "backend/sm90/mainloop.cuh"
#include "backend/sm90/producer.cuh"
#include "backend/sm90/shared.cuh"
#include "backend/sm90/split_k.cuh"

namespace nvfp4_moe::internal::sm90 {

// Called by one thread. Every row thread arrives at a stage; if they requantize, only the one warp
// that has made it.
template <class Traits, class Rows>
__device__ void init_barriers() {
  using S = Shared<Traits>;
  if (ptx::shared_address(shared_bytes) % 1024 != 0) __trap();  // required by the swizzle
  constexpr int kConsumerArrivals = Traits::kConsumerThreads / 32 * kArrivalsPerWarp;
  constexpr int kRowArrivals = Traits::kTmaRows     ? 0
                               : Rows::kRequantizes ? kArrivalsPerWarp
                                                    : kProducerRowThreads;
  for (int s = 0; s < S::kStages; ++s) {
    ptx::mbarrier_init(full_barrier<Traits>(s), 1 + kRowArrivals);
    ptx::mbarrier_init(empty_barrier<Traits>(s), kConsumerArrivals);
  }
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(info_full_barrier<Traits>(i), kProducerRowThreads);
    ptx::mbarrier_init(factors_full_barrier<Traits>(i), kProducerRowThreads);
    ptx::mbarrier_init(info_empty_barrier<Traits>(i), kConsumerArrivals);
  }
  ptx::mbarrier_init(first_rows_barrier<Traits>(), kProducerRowThreads);
  ptx::fence_mbarrier_init();
}

// Called by warps that are otherwise idle at a cta's start.
template <class Traits>
__device__ void fill_magnitudes() {
  constexpr uint32_t kFirstThread = 128;
  static_assert(kFirstThread + kFp8ScaleIndices <= Traits::kThreads);
  const uint32_t index = threadIdx.x - kFirstThread;
  if (index >= kFp8ScaleIndices) return;
  const uint2 bytes = Fp8Products::magnitudes(index);
#pragma unroll
  for (uint32_t i = 0; i < Magnitudes::kCopies;
       ++i)  // each lane of a half-warp writes to its own banks
    magnitudes<Traits>(
        static_cast<int>((index + i) % Magnitudes::kCopies))[index * Magnitudes::kCopies] = bytes;
}

// Routes a small batch in one warp, for its own cta, as route does; then sets the cta's schedule.
template <class Traits>
__device__ void route_small_batch(const GemmArgs& args, const cuda::AssignmentIds& ids) {
  const cuda::SmallBatch own(ids, Traits::kTileN);
  FusedRouting& routing = shared<Traits>().routing;
  own.list(routing.row_tiles, Traits::kTileN, true);
  if (own.row() >= 0) routing.assignment_of_row[own.row()] = cuda::SmallBatch::lane();
  if (cuda::SmallBatch::lane() == 0)
    shared<Traits>().work.schedule = Schedule(args.schedule, own.all_tiles);
}

// Processes a consumer's work tile: accumulates, then stores outputs or a partial.
template <class Traits, class Epilogue>
__device__ NVFP4_MOE_INLINE_IF_BOUNDED void consume(const GemmArgs& args, const Epilogue& epilogue,
                                                    uint32_t index, ConsumerState<Traits>& state) {
  if (epilogue.bias_table.biases != nullptr) {
    const WorkTileInfo& next = work_tile_info<Traits>(index);
#pragma unroll
    for (int m = 0; m < Traits::kM64; ++m)
      epilogue.prefetch_biases(next.rows.expert,
                               next.weight_row + weight_row_of<Traits>(ptx::read_tid_x(), m));
  }
  Accumulators<Traits> accumulators;
#pragma unroll
  for (auto& m64 : accumulators) {
#pragma unroll
    for (float& accumulator : m64) accumulator = 0;
    ptx::pin(m64);
  }
  multiply_narrowest<Traits, Traits::kTileN>(work_tile_info<Traits>(index), state, accumulators);
  if constexpr (Traits::kLateFactors)
    ptx::mbarrier_wait(factors_full_barrier<Traits>(index), index / 2 & 1);
  // read again, to keep it out of registers meanwhile
  const WorkTileInfo work = work_tile_info<Traits>(index);
  const RowFactor* const factors = row_factors<Traits>(index);
  const int thread = ptx::read_tid_x();
  if constexpr (Traits::kWide) {
    if (work.partial < 0 && epilogue.bf16_out() != nullptr) {
      if (epilogue.plain())
        return store_staged<Traits, true>(epilogue, work, factors, accumulators, thread);
      return store_staged<Traits, false>(epilogue, work, factors, accumulators, thread);
    }
  }
#pragma unroll
  for (int m = 0; m < Traits::kM64; ++m) {
    if (work.partial < 0)
      store_direct<Traits::kTileN>(epilogue, work.rows,
                                   work.weight_row + weight_row_of<Traits>(thread, m),
                                   accumulators[m], [&](int row) { return factors[row]; });
    else
      store_partial<Traits>(args, work, m, accumulators[m], thread);
  }
}

// The kernel. Rows: GatheredRows, FusedRoutingRows, RequantizedRows or TmaRows.
template <class Traits, class Epilogue, class Rows>
__device__ NVFP4_MOE_INLINE_IF_BOUNDED void gemm(const GemmArgs& args, const Epilogue& epilogue,
                                                 const Rows& rows) {
  static_assert(!Epilogue::kReportsNonfinite || Traits::kTmaRows);
  if (args.after_route) ptx::launch_dependents();
  if (threadIdx.x == 0) init_barriers<Traits, Rows>();
  if constexpr (Traits::kFp8) fill_magnitudes<Traits>();
  if constexpr (Rows::kFusedRouting) {
    if (threadIdx.x / 32 == 1) route_small_batch<Traits>(args, rows.ids);
  } else {
    if (!args.after_route) {  // the next kernel relies on route as soon as it starts
      ptx::grid_dependency_wait();
      ptx::launch_dependents();
    }
    if (threadIdx.x == 0)
      shared<Traits>().work.schedule = Schedule(args.schedule, count_row_tiles<Traits>(args));
  }
  __syncthreads();
  const Schedule& schedule = shared<Traits>().work.schedule;

  if (threadIdx.x >= Traits::kConsumerThreads) {
    ptx::setmaxnreg_dec<Traits::kProducerRegisters>();
    if (threadIdx.x >= Traits::kConsumerThreads + 32)
      produce_rows<Traits>(args, epilogue, rows, schedule);
    else if (threadIdx.x == Traits::kConsumerThreads)
      produce_weights<Traits>(args, rows, schedule);
    return;
  }
  ptx::setmaxnreg_inc<Traits::kConsumerRegisters>();
  ptx::grid_dependency_wait();  // before anything is stored, and in every cta
  if constexpr (Rows::kFusedRouting) ptx::launch_dependents();  // not earlier, for the same reason
  ConsumerState<Traits> state;
  state.constants.pin();
  int32_t left = schedule.k_blocks_of(static_cast<int32_t>(blockIdx.x));
  if (left == 0) return;
  uint32_t index = 0;
#pragma unroll 1
  for (; left > 0; ++index) {
    ptx::mbarrier_wait(info_full_barrier<Traits>(index), index / 2 & 1);
    left -= work_tile_info<Traits>(index).k_blocks;
    consume<Traits>(args, epilogue, index, state);
    arrive_as_warp(info_empty_barrier<Traits>(index), true);
  }
  reduce_split_tiles<Traits>(args, epilogue, schedule, index - 1);
}

// The wide configuration that kIndex contains.
template <size_t kIndex>
inline constexpr size_t wide_of = wide_beside(kIndex);

// Whether route has listed wide tiles. Waits for route if it may still be running.
__device__ inline bool lists_wide(const GemmArgs& args) {
  if (!args.after_route) ptx::grid_dependency_wait();
  return __ldcg(args.lists_wide) != 0;
}

}  // namespace nvfp4_moe::internal::sm90
