// Packets of all_to_all to the memory of expert ranks, and rows back to the memory of source ranks,
// for any number of tokens (backend/device_peers.h).
//
//   assign_rows    the offset of each assignment's row
//   push_packets   one CTA per token and rank: writes the inputs of the rank's gemm1, or that the
//                  rank has no slot of the token
//   push_rows      one CTA per packet, or per row if there are few: writes the rows of its slots
//
// Token and k determine every offset, so nothing is counted. The link is the limit: 128 threads
// have several 16-byte stores in flight each.
#include <cuda_runtime.h>

#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/exchange/awaited_rows.cuh"
#include "backend/cuda/exchange/peer_packets.cuh"
#include "backend/cuda/exchange/peers.h"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/scratch.h"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kAssignThreads = 256;

// The source rank's status, and the counts per token from push_tokens.
struct SourceCounts {
  RunStatus* status;
  const RowCounts* tokens;  // (token_count), or null
  int64_t token_count;
};

constexpr int64_t kRowsAtOnce = 2048;  // up to this many rows each has its own CTA

__global__ void __launch_bounds__(kPacketThreads, 8) push_packets_kernel(PushPackets call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  // Each source rank starts with a different expert rank, so that they do not all write to the same
  // one.
  const int rank = (call.link.rank + static_cast<int>(blockIdx.y)) % call.link.world;
  const bool left_out = leaves_out(call.link.wait);
  if (!left_out) push_packet(call, blockIdx.x, rank, ThreadGroup::cta());
  // If any thread skipped its part of a packet, the packet gets no flag.
  if (__syncthreads_or(left_out) == 0 && threadIdx.x == 0) flag_packet(call, blockIdx.x, rank);
}

__global__ void __launch_bounds__(kAssignThreads) assign_rows_kernel(AssignRows call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const int64_t assignment = int64_t{blockIdx.x} * kAssignThreads + threadIdx.x;
  if (assignment < call.assignments)
    call.row_of_assignment[assignment] =
        call.slots[assignment] < 0 ? -1 : static_cast<int32_t>(assignment);
  if (blockIdx.x != 0) return;
  const auto rank = static_cast<int>(threadIdx.x);
  const bool late =
      __syncthreads_or(rank < call.link.world && !packets_are_taken(call.link, rank)) != 0;
  if (rank != 0) return;
  *call.failed = late ? kPeerIsLate : 0;
  begin_dispatch(call.link);
}

// Reports that the run's packets are taken, and adds the counts per token to the source rank's
// status. Called by a CTA.
__device__ void end_of_taking(const PushRows& call, const SourceCounts& counts) {
  PeerControl* const own = call.link.wait.control;
  const uint64_t dispatch = own->dispatch;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) own->dispatch_of_rows = dispatch;
  // The kernels that read the packets have ended.
  if (thread < call.link.world && !is_stopped(call.link.wait))
    ptx::store_release_system(&control_of(call.link, thread)->taken[call.link.rank], dispatch);
  if (thread == 0 && call.expert_status != nullptr) add_counts(*counts.status, *call.expert_status);
  if (counts.tokens == nullptr) return;
  const auto add = [](uint64_t& to, uint64_t from) {
    if (from != 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&to), static_cast<unsigned long long>(from));
  };
  for (int64_t token = thread; token < counts.token_count; token += kPacketThreads) {
    const RowCounts& own_counts = counts.tokens[token];
    add(counts.status->nonfinite_tokens, own_counts.nonfinite);
    add(counts.status->hidden_blocks, own_counts.blocks);
    add(counts.status->hidden_saturated, own_counts.saturated);
    add(counts.status->hidden_zeroed, own_counts.zeroed);
  }
}

// CTA (packet, part) copies every gridDim.y-th row of the packet. One extra CTA has no packet.
__global__ void __launch_bounds__(kPacketThreads, 8)
    push_rows_kernel(PushRows call, SourceCounts counts) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const int64_t top_k = call.packet.top_k, row_bytes = call.packet.row_bytes, packet = blockIdx.x;
  if (packet == call.packets) {
    if (blockIdx.y == 0) end_of_taking(call, counts);
    return;
  }
  const bool left_out = leaves_out(call.link.wait);
  const uint32_t flag = flag_of_rows(call.link.wait.control);
  int source = 0;
  while (call.messages.first_of_source[source + 1] <= packet) ++source;
  // index of the source rank's assignment
  const int64_t first = (packet - call.messages.first_of_source[source]) * top_k;
  std::byte* const rows = call.rows.of_rank[source] + first * row_bytes;
  for (int64_t k = blockIdx.y; k < top_k && !left_out; k += gridDim.y) {
    if (call.ids[packet * top_k + k] < 0) continue;
    const int64_t row = call.row_of_assignment[packet * top_k + k];
    copy_bytes(rows + k * row_bytes, static_cast<const std::byte*>(call.rows_out) + row * row_bytes,
               row_bytes);
  }
  // Read which flags this thread writes before the barrier, while row stores are in flight.
  const int64_t own = blockIdx.y + int64_t{threadIdx.x} * gridDim.y,
                step = int64_t{blockDim.x} * gridDim.y;
  const bool flags_own = own < top_k && call.ids[packet * top_k + own] >= 0;
  if (__syncthreads_or(left_out) != 0)
    return;  // if any thread skipped its part, the rows get no flags
  auto* const flags = reinterpret_cast<uint32_t*>(call.flags.of_rank[source]) + first;
  if (flags_own) ptx::store_release_system(flags + own, flag);
  for (int64_t k = own + step; k < top_k; k += step)
    if (call.ids[packet * top_k + k] >= 0) ptx::store_release_system(flags + k, flag);
}

}  // namespace

Status assign_rows(int device, const AssignRows& call, void* stream) {
  const auto ctas =
      static_cast<unsigned>(std::max<int64_t>(1, ceil_div(call.assignments, kAssignThreads)));
  return launch_on<assign_rows_kernel>(device, "assign_rows", ctas, kAssignThreads, stream, call);
}

Status push_packets(int device, const PushPackets& call, void* stream) {
  if (call.tokens == 0) return {};
  const dim3 ctas(static_cast<unsigned>(call.tokens), static_cast<unsigned>(call.link.world));
  return launch_on<push_packets_kernel>(device, "push_packets", ctas, kPacketThreads, stream, call);
}

Status push_rows(const StepContext& source, const PushRows& call) {
  const SourceCounts counts{source.buffers.status,
                            call.counts_tokens ? Scratch(source).token_counts : nullptr,
                            source.batch.tokens};
  const bool at_once = call.packets * call.packet.top_k <= kRowsAtOnce;
  const dim3 ctas(static_cast<unsigned>(call.packets + 1),
                  at_once ? static_cast<unsigned>(call.packet.top_k) : 1);
  return launch_on<push_rows_kernel>(source.weights.device, "push_rows", ctas, kPacketThreads,
                                     source.stream, call, counts);
}

}  // namespace nvfp4_moe::internal::cuda
