// Records of all_to_all to their owners' memory, and rows to their homes' (backend/device_peers.h), of any number of tokens.
//
//   assign_rows    where each assignment's row will come to lie
//   push_records   a CTA a token and rank: what the rank's gemm1 needs of it, or that it needs nothing
//   push_rows      a CTA a record, or one of its rows where there are few: the rows of its slots
// Where something comes to lie is known beforehand, by token and k, so that nothing is counted. The link is the limit: 128
// threads that each have several 16-byte stores on the way.
#include <cuda_runtime.h>

#include <algorithm>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/exchange/awaited_rows.cuh"
#include "backend/cuda/exchange/peer_records.cuh"
#include "backend/cuda/exchange/peers.h"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/scratch.h"

namespace nvfp4_moe::cuda {
namespace {

constexpr int kAssignThreads = 256;

// The home's status, and what push_tokens has counted beside it.
struct HomeCounts {
  RunStatus* home;
  const RowCounts* tokens;  // (token_count), or null
  int64_t token_count;
};

constexpr int64_t kRowsAtOnce = 2048;  // up to here each has a CTA

__global__ void __launch_bounds__(kRecordThreads, 8) push_records_kernel(PushRecords call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  // Homes begin with different owners, so that not all write to the same one.
  const int rank = (call.link.rank + static_cast<int>(blockIdx.y)) % call.link.world;
  const bool left_out = leaves_out(call.link.wait);
  if (!left_out) push_record(call, blockIdx.x, rank, ThreadGroup::cta());
  // A record of which any thread has left out its part has no mark.
  if (__syncthreads_or(left_out) == 0 && threadIdx.x == 0) mark_record(call, blockIdx.x, rank);
}

__global__ void __launch_bounds__(kAssignThreads) assign_rows_kernel(AssignRows call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const int64_t assignment = int64_t{blockIdx.x} * kAssignThreads + threadIdx.x;
  if (assignment < call.assignments)
    call.row_of_assignment[assignment] = call.slots[assignment] < 0 ? -1 : static_cast<int32_t>(assignment);
  if (blockIdx.x != 0) return;
  const auto rank = static_cast<int>(threadIdx.x);
  const bool late = __syncthreads_or(rank < call.link.world && !records_are_taken(call.link, rank)) != 0;
  if (rank != 0) return;
  *call.failed = late ? kPeerIsLate : 0;
  begin_dispatch(call.link);
}

// The run's records are taken, and what is counted beside the home's status is added to it. By a CTA.
__device__ void end_of_taking(const PushRows& call, const HomeCounts& counts) {
  PeerControl* const own = call.link.wait.control;
  const uint64_t dispatch = own->dispatch;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) own->dispatch_of_rows = dispatch;
  // The kernels that have read the records have ended.
  if (thread < call.link.world && !is_stopped(call.link.wait))
    ptx::store_release_system(&control_of(call.link, thread)->taken[call.link.rank], dispatch);
  if (thread == 0 && call.owner != nullptr) add_counts(*counts.home, *call.owner);
  if (counts.tokens == nullptr) return;
  const auto add = [](uint64_t& to, uint64_t from) {
    if (from != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&to), static_cast<unsigned long long>(from));
  };
  for (int64_t token = thread; token < counts.token_count; token += kRecordThreads) {
    const RowCounts& own_counts = counts.tokens[token];
    add(counts.home->nonfinite_tokens, own_counts.nonfinite);
    add(counts.home->hidden_blocks, own_counts.blocks);
    add(counts.home->hidden_saturated, own_counts.saturated);
    add(counts.home->hidden_zeroed, own_counts.zeroed);
  }
}

// CTA (record, part) has every gridDim.y-th row of the record; one more has no record.
__global__ void __launch_bounds__(kRecordThreads, 8) push_rows_kernel(PushRows call, HomeCounts counts) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const int64_t top_k = call.record.top_k, row_bytes = call.record.row_bytes, record = blockIdx.x;
  if (record == call.records) {
    if (blockIdx.y == 0) end_of_taking(call, counts);
    return;
  }
  const bool left_out = leaves_out(call.link.wait);
  const uint32_t mark = mark_of_rows(call.link.wait.control);
  int home = 0;
  while (call.messages.first_of_home[home + 1] <= record) ++home;
  const int64_t first = (record - call.messages.first_of_home[home]) * top_k;  // assignment of the home
  std::byte* const rows = call.rows.of_rank[home] + first * row_bytes;
  for (int64_t k = blockIdx.y; k < top_k && !left_out; k += gridDim.y) {
    if (call.ids[record * top_k + k] < 0) continue;
    const int64_t row = call.row_of_assignment[record * top_k + k];
    copy_bytes(rows + k * row_bytes, static_cast<const std::byte*>(call.rows_out) + row * row_bytes, row_bytes);
  }
  // Which of them the thread marks is known before the rows are through.
  const int64_t own = blockIdx.y + int64_t{threadIdx.x} * gridDim.y, step = int64_t{blockDim.x} * gridDim.y;
  const bool marks_own = own < top_k && call.ids[record * top_k + own] >= 0;
  if (__syncthreads_or(left_out) != 0) return;  // rows of which any thread has left out its part have no mark
  auto* const marks = reinterpret_cast<uint32_t*>(call.marks.of_rank[home]) + first;
  if (marks_own) ptx::store_release_system(marks + own, mark);
  for (int64_t k = own + step; k < top_k; k += step)
    if (call.ids[record * top_k + k] >= 0) ptx::store_release_system(marks + k, mark);
}

}  // namespace

Status assign_rows(int device, const AssignRows& call, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const auto ctas = static_cast<unsigned>(std::max<int64_t>(1, ceil_div(call.assignments, kAssignThreads)));
  return launch<assign_rows_kernel>("assign_rows", ctas, kAssignThreads, 0, stream, call);
}

Status push_records(int device, const PushRecords& call, void* stream) {
  if (call.tokens == 0) return {};
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const dim3 ctas(static_cast<unsigned>(call.tokens), static_cast<unsigned>(call.link.world));
  return launch<push_records_kernel>("push_records", ctas, kRecordThreads, 0, stream, call);
}

Status push_rows(const StepContext& home, const PushRows& call) {
  const DeviceGuard guard(home.weights.device);
  NVFP4_MOE_TRY(guard.status());
  const HomeCounts counts{home.buffers.status, call.counts_tokens ? Scratch(home).token_counts : nullptr,
                          home.batch.tokens};
  const bool at_once = call.records * call.record.top_k <= kRowsAtOnce;
  const dim3 ctas(static_cast<unsigned>(call.records + 1), at_once ? static_cast<unsigned>(call.record.top_k) : 1);
  return launch<push_rows_kernel>("push_rows", ctas, kRecordThreads, 0, home.stream, call, counts);
}

}  // namespace nvfp4_moe::cuda
