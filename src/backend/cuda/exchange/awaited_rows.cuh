// Waiting for rows of other ranks in combine, and adding an expert rank's counts to its source
// rank's (backend/device_exchange.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/exchange/packets.cuh"
#include "backend/cuda/exchange/peers.cuh"
#include "backend/layer_steps.h"

namespace nvfp4_moe::internal::cuda {

// Whether the row of an assignment has arrived, or is not needed. Called by one thread; peer memory
// only.
__device__ inline bool row_came(const AwaitedRows& awaited, const int32_t* row_of_assignment,
                                int64_t assignment, uint32_t flag) {
  if (__ldcg(row_of_assignment + assignment) < 0) return true;
  const auto expert_rank = [&] {
    const int32_t slot = __ldcg(awaited.slots + assignment);
    int rank = 0;
    while (__ldcg(awaited.first_of_rank + rank + 1) <= slot) ++rank;
    return rank;
  };
  return wait_for_rank(awaited.wait, expert_rank, [&] {
    return ptx::load_acquire_system(awaited.flags + assignment) == flag;
  });
}

// Waits for the rows of a token's assignments. True: the run has failed, and out must be NaN.
// Called by a CTA. With peer memory it is called before the CTA waits for the preceding kernel.
__device__ inline bool rows_failed(const AwaitedRows& awaited, const int32_t* row_of_assignment,
                                   int64_t token, int64_t top_k) {
  bool late = false;
  if (awaited.flags != nullptr) {
    const uint32_t flag = flag_of_rows(awaited.wait.control);
    for (int64_t k = threadIdx.x; k < top_k; k += blockDim.x)
      late |= !row_came(awaited, row_of_assignment, token * top_k + k, flag);
    if (late) atomicOr(awaited.failed, kPeerIsLate);
  }
  // Set by a kernel of this rank or by another token's CTA that found a fault, or by the host if
  // the link has failed.
  const bool failed =
      threadIdx.x == 0 &&
      (ptx::load_volatile(awaited.failed) != 0 ||
       (awaited.link_failed != nullptr && ptx::load_volatile(awaited.link_failed) != 0));
  return __syncthreads_or(late || failed) != 0;
}

// Called by one thread.
__device__ inline void add_counts(RunStatus& source, const RunStatus& expert) {
  const auto add = [](uint64_t& to, const uint64_t& from) {
    if (from != 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&to), static_cast<unsigned long long>(from));
  };
  add(source.nonfinite_rows, expert.nonfinite_rows);
  add(source.intermediate_blocks, expert.intermediate_blocks);
  add(source.intermediate_saturated, expert.intermediate_saturated);
  add(source.intermediate_zeroed, expert.intermediate_zeroed);
}

}  // namespace nvfp4_moe::internal::cuda
