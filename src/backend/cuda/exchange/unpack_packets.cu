// Packets to the operands of the expert rank's gemm1, and its rows to the offsets that packets
// request (backend/device_exchange.h).
//
// Each CTA has one packet. It turns codes and block scales into the operand that quantize would
// have made of the token, and detects slots of other ranks and rows beyond their message. If there
// are few packets, an extra CTA reads all slots and routes them at the same time. Memory is the
// limit.
#include <cuda_runtime.h>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/exchange/awaited_rows.cuh"
#include "backend/cuda/exchange/packets.cuh"
#include "backend/cuda/exchange/packets.h"
#include "backend/cuda/exchange/peers.cuh"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/route.cuh"

namespace nvfp4_moe::internal::cuda {
namespace {

// ---- unpack

struct TakeArgs {
  UnpackPackets call;
  RowArgs rows;  // for the expert rank's hidden
  int64_t packets;
};

__device__ Vec8 vec8_of(uint32_t codes, uint32_t scale) {
  const float v = e4m3_to_float(scale);
  uint32_t operand[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    operand[i] = uint32_t{bf16_from_float(e2m1_to_float(codes >> i * 8 & 0xF) * v)} |
                 uint32_t{bf16_from_float(e2m1_to_float(codes >> (i * 8 + 4) & 0xF) * v)} << 16;
  return {codes, make_uint4(operand[0], operand[1], operand[2], operand[3]), scale, false, false};
}

// Copies a packet's activations to the expert rank's row.
template <ActivationFormat kFormat>
__device__ void take_activations(const RowArgs& rows, const std::byte* packet, int64_t row) {
  const int64_t k = rows.k;
  int64_t values_end = k;
  if constexpr (kFormat == ActivationFormat::kNvfp4) {
    const OperandRow<Vec8> to(rows, row);
    for (int64_t i = threadIdx.x; i < k / 8; i += blockDim.x)
      to.put(i, vec8_of(reinterpret_cast<const uint32_t*>(packet)[i],
                        static_cast<uint32_t>(packet[k / 2 + i / 2])));
    for (int64_t i = k / 8 + threadIdx.x; to.pads(i); i += blockDim.x) to.put(i, Vec8{});
    values_end = k / 2 + k / 16;
  } else if constexpr (kFormat == ActivationFormat::kFp8) {
    const OperandRow<E4m3Vec8> to(rows, row);
    for (int64_t i = threadIdx.x; i < k / 8; i += blockDim.x) {
      const uint2 codes = reinterpret_cast<const uint2*>(packet)[i];
      to.put(i, E4m3Vec8{{codes.x, codes.y}, false, false});
    }
    for (int64_t i = k / 8 + threadIdx.x; to.pads(i); i += blockDim.x) to.put(i, E4m3Vec8{});
  } else {
    copy_bytes(reinterpret_cast<std::byte*>(rows.out.bf16 + row * k), packet, 2 * k);
    values_end = 2 * k;
  }
  if (threadIdx.x != 0) return;
  if constexpr (kFormat != ActivationFormat::kBf16) {
    uint32_t scale = 0;  // not aligned in the packet
#pragma unroll
    for (int i = 0; i < 4; ++i) scale |= static_cast<uint32_t>(packet[values_end + i]) << 8 * i;
    rows.out.row_scale[row] = __uint_as_float(scale);
    values_end += 4;
  }
  rows.out.nonfinite[row] = packet[values_end] != std::byte{0};
}

// Checks the headers of all messages with one warp. An impossible header is reported as a wrong
// packet.
__device__ void check_headers(const UnpackPackets& call) {
  int32_t most = -1;
  uint32_t pair = 0;  // source rank << 16 | expert rank
  for (int64_t source = thread_of_cta(); source < call.layout.world; source += 32) {
    const MessageHeader* const header =
        header_at(call.layout, const_cast<std::byte*>(call.messages), source, call.bounds[source]);
    if (header->most_rank < 0 || header->most_rank >= call.layout.world || header->tokens < 0 ||
        header->most_tokens < header->tokens) {
      atomicOr(call.failed, kWrong);
      atomicAdd(reinterpret_cast<unsigned long long*>(&call.report->wrong), 1ull);
      continue;
    }
    if (header->most_tokens <= most) continue;
    most = header->most_tokens;
    pair = static_cast<uint32_t>(source) << 16 | static_cast<uint32_t>(header->most_rank);
  }
  const int32_t most_of_all = __reduce_max_sync(kAllLanes, most);
  pair = __reduce_min_sync(kAllLanes, most == most_of_all ? pair : 0xFFFFFFFFu);
  if (thread_of_cta() != 0 || most_of_all <= call.capacity) return;
  atomicOr(call.failed, kOverflowed);
  atomicAdd(reinterpret_cast<unsigned long long*>(&call.report->runs), 1ull);
  atomicMax(reinterpret_cast<unsigned long long*>(&call.report->most),
            static_cast<unsigned long long>(most_of_all) << 32 | pair);
}

// The source rank of a packet, and the range of its message's rows among all rows.
struct Source {
  int64_t rank, first_row, end_row;
  __device__ Source(const UnpackPackets& call, int64_t packet) {
    const int64_t world = call.layout.world;
    const int32_t* const bounds = call.bounds;
    int64_t low = 0, high = world - 1;  // the last rank whose first packet is not after this one
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (bounds[middle] <= packet)
        low = middle;
      else
        high = middle - 1;
    }
    rank = low;
    first_row = bounds[world + 1 + rank], end_row = bounds[world + 2 + rank];
  }
};

// A packet as its source rank has sent it.
struct Received {
  const std::byte* at = nullptr;
  const uint32_t* flag = nullptr;  // only with peer memory
  // without peer memory: its first row among all, and the end of its message's rows
  int64_t first_row = 0, end_row = 0;

  // Called by any thread. With peer memory the packet is complete only after came_over_peers
  // returns true.
  __device__ Received(const UnpackPackets& call, int64_t index) {
    const PacketFormat& packet = call.layout.packet;
    if (call.peers.packet_stride > 0) {
      const int source = source_of(call, index);
      const int64_t in_region =
          source * call.peers.packet_stride + index - call.peers.first_of_source[source];
      at = call.messages + in_region * packet.bytes;
      flag = call.peers.flags + in_region;
      return;
    }
    const Source source(call, index);
    at = packet_at(call.layout, const_cast<std::byte*>(call.messages), source.rank, index);
    first_row = source.first_row + *reinterpret_cast<const int32_t*>(at + packet.first_row_at);
    end_row = first_row < source.first_row ? first_row : source.end_row;
  }
  __device__ static int source_of(const UnpackPackets& call, int64_t index) {
    int source = 0;
    while (call.peers.first_of_source[source + 1] <= index) ++source;
    return source;
  }
  // Waits for the packet's flag. Called by one thread.
  __device__ bool came_over_peers(const UnpackPackets& call, int64_t index) const {
    if (flag == nullptr) return true;
    const uint32_t awaited = flag_of_packets(call.wait.control);
    return wait_for_rank(
        call.wait, [&] { return source_of(call, index); },
        [&] { return ptx::load_acquire_system(flag) == awaited; });
  }
};

// Counts a packet's slots, and checks that all are this rank's, with rows inside their message.
struct OwnSlots {
  const int32_t* slots;
  int32_t own = 0;
  bool wrong;
  __device__ OwnSlots(const UnpackPackets& call, const Received& packet)
      : slots(reinterpret_cast<const int32_t*>(packet.at + call.layout.packet.slots_at)) {
    int32_t others = 0;
    const int32_t first = static_cast<int32_t>(call.range.first),
                  end = first + static_cast<int32_t>(call.range.count);
    for (int64_t k = 0; k < call.layout.packet.top_k; ++k) {
      own += slots[k] != -1;
      others += slots[k] != -1 && (slots[k] < first || slots[k] >= end);
    }
    const bool peers = call.peers.packet_stride > 0;
    wrong = own > 0 && (others > 0 || (!peers && packet.first_row + own > packet.end_row));
  }
};

// Copies the packet's slots to the expert rank's batch. Each of `step` threads copies every step-th
// slot, starting at `lane`. All become -1 if the packet is wrong or late.
__device__ void take_slots(const UnpackPackets& call, const Received& packet, const OwnSlots& slots,
                           bool came, int64_t index, int64_t lane, int64_t step) {
  const PacketFormat& layout = call.layout.packet;
  const int32_t first = static_cast<int32_t>(call.range.first),
                end = first + static_cast<int32_t>(call.range.count);
  for (int64_t k = lane; k < layout.top_k; k += step) {
    // Checked again at this read: with peer memory the source rank can still write to it.
    const int32_t slot = slots.slots[k];
    call.ids[index * layout.top_k + k] =
        slots.wrong || !came || slot < first || slot >= end ? -1 : slot;
    call.weights[index * layout.top_k + k] =
        reinterpret_cast<const float*>(packet.at + layout.weights_at)[k];
  }
  if (lane != 0) return;
  if (call.peers.packet_stride == 0)
    call.first_rows[index] = static_cast<int32_t>(packet.first_row);
  if (came && !slots.wrong) return;
  ptx::grid_dependency_wait();  // the kernel that begins the run has ended
  atomicOr(call.failed, came ? kWrong : kPeerIsLate);
  if (came) atomicAdd(reinterpret_cast<unsigned long long*>(&call.report->wrong), 1ull);
}

// Copies all slots of few packets to the expert rank's batch, one per thread, so that reads
// overlap. Returns whether any packet is wrong or late; then take_slots must do it. Called by a
// CTA; peer memory only.
__device__ bool take_all_slots(const UnpackPackets& call, int64_t packets) {
  const PacketFormat& layout = call.layout.packet;
  const auto top_k = static_cast<int32_t>(layout.top_k),
             count = static_cast<int32_t>(packets) * top_k;
  const auto first = static_cast<int32_t>(call.range.first),
             end = first + static_cast<int32_t>(call.range.count);
  bool slow = false;
  for (int32_t assignment = thread_of_cta(); assignment < count; assignment += threads_of_cta()) {
    const int32_t index = assignment / top_k, k = assignment % top_k;
    const Received packet(call, index);
    const bool came = packet.came_over_peers(call, index);
    const int32_t slot = reinterpret_cast<const int32_t*>(packet.at + layout.slots_at)[k];
    const float weight = reinterpret_cast<const float*>(packet.at + layout.weights_at)[k];
    slow |= !came || (slot != -1 && (slot < first || slot >= end));
    call.ids[assignment] = slot;
    call.weights[assignment] = weight;
  }
  return __syncthreads_or(slow) != 0;
}

// kRoutes: CTA 0 reads all slots and routes. It has the number of threads that route needs, in two
// dimensions; the other CTAs use only the first dimension. With peer memory only the packet's flag
// is waited for: if the source ranks are faster than this one, the preceding kernel may still run.
// gemm1, whose CTAs occupy every multiprocessor, starts only when all packets have arrived.
template <ActivationFormat kFormat, bool kRoutes>
__global__ void __launch_bounds__(kRoutes ? kRouteLargeThreads : kPacketThreads, kRoutes ? 1 : 8)
    unpack_packets_kernel(TakeArgs args, const __grid_constant__ RouteArgs route) {
  extern __shared__ uint4 route_shared[];
  const UnpackPackets& call = args.call;
  const bool peers = call.peers.packet_stride > 0;
  if (!peers) {
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
  }
  if (blockIdx.x == 0 && thread_of_cta() < 32 && call.layout.fixed) check_headers(call);
  if (kRoutes && blockIdx.x == 0) {
    if (!peers || take_all_slots(call, args.packets)) {
      for (int64_t index = thread_of_cta(); index < args.packets; index += threads_of_cta()) {
        const Received packet(call, index);
        const bool came = packet.came_over_peers(call, index);
        take_slots(call, packet, OwnSlots(call, packet), came, index, 0, 1);
      }
      __syncthreads();
    }
    if (peers) ptx::launch_dependents();
    route_by_one_cta(route, route_shared);
  } else {
    if (threadIdx.y != 0) return;
    const int64_t index = static_cast<int64_t>(blockIdx.x) - (kRoutes ? 1 : 0);
    const Received packet(call, index);
    const bool came = !__syncthreads_or(threadIdx.x == 0 && !packet.came_over_peers(call, index));
    if (peers) ptx::launch_dependents();
    const OwnSlots slots(call, packet);
    if (!kRoutes) take_slots(call, packet, slots, came, index, threadIdx.x, blockDim.x);
    if (came && slots.own > 0 && !slots.wrong)
      take_activations<kFormat>(args.rows, packet.at, index);
  }
  if (peers) ptx::grid_dependency_wait();
}

// Waits for the first packet of each source rank. If a packet is late, the CTA that takes it
// detects that again without delay.
__global__ void __launch_bounds__(32)
    await_packets_kernel(const __grid_constant__ UnpackPackets call) {
  const auto source = static_cast<int>(threadIdx.x);
  if (source < call.layout.world &&
      call.peers.first_of_source[source] < call.peers.first_of_source[source + 1])
    Received(call, call.peers.first_of_source[source])
        .came_over_peers(call, call.peers.first_of_source[source]);
  __syncwarp();
  // only now, so that dependent CTAs do not occupy the device while they wait
  ptx::launch_dependents();
  ptx::grid_dependency_wait();
}

// ---- rows back

__global__ void __launch_bounds__(kPacketThreads, 8) pack_rows_kernel(PackRows call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x == 0) add_counts(*call.source_status, *call.expert_status);
  const int64_t top_k = call.packet.top_k, row_bytes = call.packet.row_bytes,
                assignment = blockIdx.x * top_k;
  int64_t to = call.first_rows[blockIdx.x];
  for (int64_t k = 0; k < top_k; ++k) {
    if (call.ids[assignment + k] < 0) continue;
    const int64_t row = call.row_of_assignment[assignment + k];
    if (row >= 0)
      copy_bytes(call.messages + to * row_bytes,
                 static_cast<const std::byte*>(call.rows_out) + row * row_bytes, row_bytes);
    ++to;
  }
}

}  // namespace

Status unpack_packets(const StepContext& expert, const LayerSteps& steps,
                      const UnpackPackets& call) {
  if (expert.batch.tokens == 0) return {};
  const DeviceGuard guard(expert.weights.device);
  NVFP4_MOE_TRY(guard.status());
  const MoeConfig& config = expert.weights.config;
  TakeArgs args{call, {}, expert.batch.tokens};
  args.rows.k = config->hidden_size;
  args.rows.out = expert.buffers.routed.hidden;
  args.rows.operand = Scratch(expert).hidden_operand;
  args.rows.operand_kind = expert.plan->operand;
  const RoutePlan& plan = expert.plan->route;
  const bool routes = plan.kernel == RouteKernel::kOneCta && plan.threads % kPacketThreads == 0;
  const auto packets = static_cast<unsigned>(expert.batch.tokens);
  if (call.peers.packet_stride > 0 && expert.batch.tokens > kWaitingCtas)
    NVFP4_MOE_TRY(launch<await_packets_kernel>("await_packets", 1u, 32, 0, expert.stream, call));
  const auto launch_as = [&]<ActivationFormat kFormat>() {
    if (!routes)
      return launch<unpack_packets_kernel<kFormat, false>>(
          "unpack_packets", packets, kPacketThreads, 0, expert.stream, args, RouteArgs{});
    const dim3 threads(kPacketThreads, static_cast<unsigned>(plan.threads / kPacketThreads));
    return launch<unpack_packets_kernel<kFormat, true>>("unpack_packets", 1 + packets, threads,
                                                        plan.shared_bytes, expert.stream, args,
                                                        route_args(expert, steps.counters(expert)));
  };
  const auto unpack = [&] {
    switch (config->activation_format) {
      case ActivationFormat::kNvfp4:
        return launch_as.template operator()<ActivationFormat::kNvfp4>();
      case ActivationFormat::kFp8: return launch_as.template operator()<ActivationFormat::kFp8>();
      default: return launch_as.template operator()<ActivationFormat::kBf16>();
    }
  };
  NVFP4_MOE_TRY(unpack());
  return routes ? Status() : steps.route(expert);
}

Status pack_rows(int device, const PackRows& call, void* stream) {
  if (call.packets == 0) return {};
  return launch_on<pack_rows_kernel>(device, "pack_rows", static_cast<unsigned>(call.packets),
                                     kPacketThreads, stream, call);
}

}  // namespace nvfp4_moe::internal::cuda
