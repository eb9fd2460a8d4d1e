// Tokens to packets on their source rank (backend/device_exchange.h).
//
//   count, scan   one CTA per rank: counts the rank's tokens and slots, then scans them to assign
//                 packets and rows
//   pack          one CTA per packet: writes activations, slots and weights as they are sent
//
// count and scan read all slots once for each rank. pack is limited by memory.
#include <cuda_runtime.h>

#include <algorithm>

#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/exchange/packets.cuh"
#include "backend/cuda/exchange/packets.h"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/route.cuh"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kScanThreads = 1024;  // handle one rank's tokens; the maximum
constexpr int kWordsPerLaunch = 256;

// ---- count and scan

// The number of a token's slots in [first, end).
__device__ int32_t slots_of(const CountPackets& call, int64_t token, int32_t first, int32_t end) {
  int32_t slots = 0;
  for (int64_t k = 0; k < call.top_k; ++k) {
    const int32_t slot = call.slots[token * call.top_k + k];
    slots += slot >= first && slot < end;
  }
  return slots;
}

__global__ void __launch_bounds__(kScanThreads) count_packets(CountPackets call) {
  __shared__ int32_t totals[2];
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (threadIdx.x < 2) totals[threadIdx.x] = 0;
  __syncthreads();
  const int64_t rank = blockIdx.x;
  const int32_t first = call.first_of_rank[rank], end = call.first_of_rank[rank + 1];
  int32_t tokens = 0, rows = 0;
  for (int64_t token = threadIdx.x; token < call.tokens; token += blockDim.x) {
    const int32_t slots = slots_of(call, token, first, end);
    tokens += slots > 0;
    rows += slots;
  }
  tokens = __reduce_add_sync(kAllLanes, tokens);
  rows = __reduce_add_sync(kAllLanes, rows);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(totals, tokens);
    atomicAdd(totals + 1, rows);
  }
  __syncthreads();
  if (threadIdx.x < 2) call.counts[rank * 2 + threadIdx.x] = totals[threadIdx.x];
}

// Offsets of this rank's first packet and first row among those of all ranks, and its message
// header. Called by one warp.
struct MessageStart {
  int32_t packets, rows;
  __device__ MessageStart(const ScanPackets& call, int64_t rank) {
    const int64_t lane = threadIdx.x % 32, world = call.layout.world;
    int32_t before = 0, rows_before = 0, most = -1, most_rank = 0;
    for (int64_t r = lane; r < world; r += 32) {
      const auto tokens = static_cast<int32_t>(call.counted.counts[r * 2]);
      if (r < rank)
        before += tokens, rows_before += static_cast<int32_t>(call.counted.counts[r * 2 + 1]);
      if (tokens > most) most = tokens, most_rank = static_cast<int32_t>(r);
    }
    packets = __reduce_add_sync(kAllLanes, before);
    rows = __reduce_add_sync(kAllLanes, rows_before);
    const int32_t most_of_all = __reduce_max_sync(kAllLanes, most);
    most_rank = __reduce_min_sync(kAllLanes, most == most_of_all ? most_rank : 0x7FFFFFFF);
    if (!call.layout.fixed) return;
    packets = static_cast<int32_t>(rank * call.layout.packets);
    rows = static_cast<int32_t>(packets * call.counted.top_k);
    if (lane != 0) return;
    const int64_t* const own = call.counted.counts + rank * 2;
    *header_at(call.layout, call.messages, rank, packets) = {
        static_cast<int32_t>(own[0]), static_cast<int32_t>(own[1]), most_of_all, most_rank};
  }
};

__global__ void __launch_bounds__(kScanThreads) scan_packets(ScanPackets call) {
  __shared__ Totals warp_totals[32];
  __shared__ int32_t starts[2];
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const CountPackets& counted = call.counted;
  const int64_t rank = blockIdx.x, top_k = counted.top_k;
  if (threadIdx.x < 32) {
    const MessageStart start(call, rank);
    starts[0] = start.packets, starts[1] = start.rows;
    if (rank == 0) *call.failed = 0;
  }
  __syncthreads();
  const int32_t first = counted.first_of_rank[rank], end = counted.first_of_rank[rank + 1];
  Totals before;  // its tiles are packets in this kernel
  for (int64_t next = 0; next < counted.tokens; next += blockDim.x) {
    const int64_t token = next + threadIdx.x;
    Totals own, total;
    if (token < counted.tokens) own.rows = slots_of(counted, token, first, end);
    own.tiles = own.rows > 0;
    const Totals at = cta_exclusive(own, warp_totals, total);
    const int32_t packet = before.tiles + at.tiles, first_row = before.rows + at.rows;
    before.tiles += total.tiles, before.rows += total.rows;
    if (own.rows == 0) continue;
    const bool fits = packet < call.layout.packets;
    if (fits)
      call.sources[starts[0] + packet] = {static_cast<int32_t>(token), static_cast<int32_t>(rank),
                                          first_row};
    int32_t row = starts[1] + first_row;
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t slot = counted.slots[token * top_k + k];
      if (slot >= first && slot < end)
        call.row_of_assignment[token * top_k + k] = fits ? row++ : -1;
    }
  }
  if (!call.layout.fixed) return;
  for (int64_t i = before.tiles + threadIdx.x; i < call.layout.packets; i += blockDim.x)
    call.sources[starts[0] + i] = {-1, static_cast<int32_t>(rank), 0};
}

// ---- pack

__global__ void __launch_bounds__(kPacketThreads, 6) pack_packets(PackPackets call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const PacketFormat& packet = call.layout.packet;
  const PacketSource source = call.sources[blockIdx.x];
  std::byte* const to = packet_at(call.layout, call.messages, source.rank, blockIdx.x);
  const PacketOfToken token{packet, call.from.arrays, call.from.slots, call.from.weights};
  if (source.token < 0)
    token.put_none(to, ThreadGroup::cta());
  else
    token.put(to, source.token, call.from.first_of_rank[source.rank],
              call.from.first_of_rank[source.rank + 1], ThreadGroup::cta());
  if (threadIdx.x == 0) *reinterpret_cast<int32_t*>(to + packet.first_row_at) = source.first_row;
}

struct Words {
  int32_t values[kWordsPerLaunch];
};
__global__ void __launch_bounds__(kWordsPerLaunch)
    write_words_kernel(Words words, int32_t count, int32_t* to) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (static_cast<int32_t>(threadIdx.x) < count) to[threadIdx.x] = words.values[threadIdx.x];
}

// ---- launches

unsigned scan_threads(int64_t tokens) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(tokens, 32) * 32, 32, kScanThreads));
}

Status count(int device, const CountPackets& call, void* stream) {
  return launch_on<count_packets>(device, "count_packets", static_cast<unsigned>(call.world),
                                  scan_threads(call.tokens), stream, call);
}

Status scan_tokens(int device, const ScanPackets& call, void* stream) {
  return launch_on<scan_packets>(device, "scan_packets", static_cast<unsigned>(call.layout.world),
                                 scan_threads(call.counted.tokens), stream, call);
}

Status pack(int device, const PackPackets& call, void* stream) {
  if (call.packets == 0) return {};
  return launch_on<pack_packets>(device, "pack_packets", static_cast<unsigned>(call.packets),
                                 kPacketThreads, stream, call);
}

Status write_words(int device, const int32_t* values, int64_t count, int32_t* to, void* stream) {
  for (int64_t first = 0; first < count; first += kWordsPerLaunch) {
    const auto words = static_cast<int32_t>(std::min<int64_t>(kWordsPerLaunch, count - first));
    Words part{};
    std::copy_n(values + first, words, part.values);
    NVFP4_MOE_TRY(launch_on<write_words_kernel>(device, "write_words", 1u, kWordsPerLaunch, stream,
                                                part, words, to + first));
  }
  return {};
}

constexpr DevicePackets kPackets = {count,          scan_tokens, pack,
                                    unpack_packets, pack_rows,   write_words};

}  // namespace
}  // namespace nvfp4_moe::internal::cuda

namespace nvfp4_moe::internal {
constinit const DevicePackets kCudaPackets = cuda::kPackets;
}
