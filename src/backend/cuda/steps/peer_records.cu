// Records of all_to_all to their owners' memory, and rows to their homes' (backend/device_peers.h).
//
//   assign_rows     where each assignment's row will come to lie
//   push_records   a CTA a token and rank: what the rank's gemm1 needs of it, or that it needs nothing
//   push_rows      a CTA a record: the rows of its slots
// Where something comes to lie is known beforehand, by token and k, so that nothing is counted. The link is the limit: 128
// threads that each have several 16-byte stores on the way.
#include <cuda_runtime.h>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/peers.cuh"
#include "backend/cuda/steps/peers.h"
#include "backend/cuda/steps/records.cuh"

namespace nvfp4_moe::cuda {
namespace {

constexpr int kAssignThreads = 256;

__global__ void __launch_bounds__(kRecordThreads, 8) push_records_kernel(PushRecords call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (is_stopped(call.link)) return;
  const WireRecord& record = call.record;
  const int64_t token = blockIdx.x, top_k = record.top_k;
  // Homes begin with different owners, so that not all write to the same one.
  const int rank = (call.link.rank + static_cast<int>(blockIdx.y)) % call.link.world;
  const int32_t first = call.first_of_rank[rank], end = call.first_of_rank[rank + 1];
  bool any = false;
  for (int64_t k = 0; k < top_k; ++k) {
    const int32_t slot = call.slots[token * top_k + k];
    any |= slot >= first && slot < end;
  }
  std::byte* const to = call.records.of_rank[rank] + (call.link.rank * call.record_stride + token) * record.bytes;
  const RecordOfToken of_token{record, call.arrays, call.slots, call.weights};
  if (any)
    of_token.put(to, token, first, end, 0);
  else
    of_token.put_none(to);
}

__global__ void __launch_bounds__(kAssignThreads)
    assign_rows_kernel(const int32_t* slots, int64_t assignments, int32_t* row_of_assignment) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const int64_t assignment = int64_t{blockIdx.x} * kAssignThreads + threadIdx.x;
  if (assignment < assignments)
    row_of_assignment[assignment] = slots[assignment] < 0 ? -1 : static_cast<int32_t>(assignment);
}

__global__ void __launch_bounds__(kRecordThreads, 8) push_rows_kernel(PushRows call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (is_stopped(call.link)) return;
  const int64_t top_k = call.record.top_k, row_bytes = call.record.row_bytes, record = blockIdx.x;
  int home = 0;
  while (call.messages.first_of_home[home + 1] <= record) ++home;
  std::byte* const rows = call.rows.of_rank[home] + (record - call.messages.first_of_home[home]) * top_k * row_bytes;
  for (int64_t k = 0; k < top_k; ++k) {
    if (call.ids[record * top_k + k] < 0) continue;
    const int64_t row = call.row_of_assignment[record * top_k + k];
    if (row >= 0)
      copy_bytes(rows + k * row_bytes, static_cast<const std::byte*>(call.rows_out) + row * row_bytes, row_bytes);
  }
}

}  // namespace

Status assign_rows(int device, const int32_t* slots, int64_t assignments, int32_t* row_of_assignment, void* stream) {
  if (assignments == 0) return {};
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const auto ctas = static_cast<unsigned>(ceil_div(assignments, kAssignThreads));
  return launch<assign_rows_kernel>("assign_rows", ctas, kAssignThreads, 0, stream, slots, assignments,
                                    row_of_assignment);
}

Status push_records(int device, const PushRecords& call, void* stream) {
  if (call.tokens == 0) return {};
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const dim3 ctas(static_cast<unsigned>(call.tokens), static_cast<unsigned>(call.link.world));
  return launch<push_records_kernel>("push_records", ctas, kRecordThreads, 0, stream, call);
}

Status push_rows(int device, const PushRows& call, void* stream) {
  if (call.records == 0) return {};
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  return launch<push_rows_kernel>("push_rows", static_cast<unsigned>(call.records), kRecordThreads, 0, stream, call);
}

}  // namespace nvfp4_moe::cuda
