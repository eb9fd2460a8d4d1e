// Rows of other ranks that combine waits for (backend/device_exchange.h), and counts of an owner that its home takes over.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/exchange/peers.cuh"
#include "backend/cuda/exchange/records.cuh"
#include "backend/layer_steps.h"

namespace nvfp4_moe::cuda {

// Whether the row of an assignment has come, or needs not. By one thread, over peers.
__device__ inline bool row_came(const AwaitedRows& awaited, const int32_t* row_of_assignment, int64_t assignment,
                                uint32_t mark) {
  if (__ldcg(row_of_assignment + assignment) < 0) return true;
  const auto owner = [&] {
    const int32_t slot = __ldcg(awaited.slots + assignment);
    int rank = 0;
    while (__ldcg(awaited.first_of_rank + rank + 1) <= slot) ++rank;
    return rank;
  };
  return wait_for_rank(awaited.wait, owner,
                       [&] { return ptx::load_acquire_system(awaited.marks + assignment) == mark; });
}

// Once all rows of a token's assignments are there: whether the run has failed, and out is NaN. By a CTA, before it waits for the
// kernel before it where rows come over peers.
__device__ inline bool rows_failed(const AwaitedRows& awaited, const int32_t* row_of_assignment, int64_t token,
                                   int64_t top_k) {
  bool late = false;
  if (awaited.marks != nullptr) {
    const uint32_t mark = mark_of_rows(awaited.wait.control);
    for (int64_t k = threadIdx.x; k < top_k; k += blockDim.x)
      late |= !row_came(awaited, row_of_assignment, token * top_k + k, mark);
    if (late) atomicOr(awaited.failed, kPeerIsLate);
  }
  // Set by a kernel of this rank or another token's CTA that found a fault, or by the host if the link has failed.
  const bool failed =
      threadIdx.x == 0 && (ptx::load_volatile(awaited.failed) != 0 ||
                           (awaited.link_failed != nullptr && ptx::load_volatile(awaited.link_failed) != 0));
  return __syncthreads_or(late || failed) != 0;
}

// By one thread.
__device__ inline void add_counts(RunStatus& home, const RunStatus& owner) {
  const auto add = [](uint64_t& to, const uint64_t& from) {
    if (from != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&to), static_cast<unsigned long long>(from));
  };
  add(home.nonfinite_rows, owner.nonfinite_rows);
  add(home.intermediate_blocks, owner.intermediate_blocks);
  add(home.intermediate_saturated, owner.intermediate_saturated);
  add(home.intermediate_zeroed, owner.intermediate_zeroed);
}

}  // namespace nvfp4_moe::cuda
