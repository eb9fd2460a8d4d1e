// A record to its owner's memory, by a CTA of whatever kernel has the token (backend/device_peers.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/exchange/peers.cuh"
#include "backend/cuda/exchange/records.cuh"

namespace nvfp4_moe::cuda {

// Waits until the rank has taken the records of the run before. By one thread.
__device__ inline bool records_are_taken(const PeerLink& link, int rank) {
  const PeerControl* const own = link.wait.control;
  const uint64_t before = word_from_l2(own->dispatch_of_rows);
  const auto taken = [&] { return ptx::load_acquire_system(&own->taken[rank]) >= before; };
  return wait_for_rank(
      link.wait, [&] { return rank; }, taken);
}
// By one thread of those that begin a run: the kernels that read this word follow.
__device__ inline void begin_dispatch(const PeerLink& link) {
  link.wait.control->dispatch = link.wait.control->dispatch_of_rows + 1;
}

__device__ inline void push_record(const PushRecords& call, int64_t token, int rank, ThreadGroup group) {
  const int64_t top_k = call.record.top_k;
  const int32_t first = call.first_of_rank[rank], end = call.first_of_rank[rank + 1];
  bool any = false;
  for (int64_t k = 0; k < top_k; ++k) {
    const int32_t slot = call.slots[token * top_k + k];
    any |= slot >= first && slot < end;
  }
  std::byte* const to = call.records.of_rank[rank] + (call.link.rank * call.record_stride + token) * call.record.bytes;
  const RecordOfToken of_token{call.record, call.arrays, call.slots, call.weights};
  if (any)
    of_token.put(to, token, first, end, group);
  else
    of_token.put_none(to, group);
}

// Behind a barrier of the threads that have written the record. By one thread.
__device__ inline void mark_record(const PushRecords& call, int64_t token, int rank) {
  auto* const marks = reinterpret_cast<uint32_t*>(call.marks.of_rank[rank]);
  ptx::store_release_system(marks + call.link.rank * call.record_stride + token,
                            mark_of_records(call.link.wait.control));
}

}  // namespace nvfp4_moe::cuda
