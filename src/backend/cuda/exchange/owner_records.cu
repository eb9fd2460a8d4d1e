// Records to what the owner's gemm1 reads, and its rows to where the records ask for them (backend/device_exchange.h).
//
// A CTA has a record. Codes and block scales become the operand that quantize would have made of the token; slots of other
// ranks and rows beyond their message are found here. Of few records one more CTA reads all slots, and routes them meanwhile.
// Memory is the limit.
#include <cuda_runtime.h>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/exchange/awaited_rows.cuh"
#include "backend/cuda/exchange/peers.cuh"
#include "backend/cuda/exchange/records.cuh"
#include "backend/cuda/exchange/records.h"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/route.cuh"

namespace nvfp4_moe::cuda {
namespace {

// ---- take

struct TakeArgs {
  TakeRecords call;
  RowArgs rows;  // of the owner's hidden
  int64_t records;
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

// A record's activations to the owner's row.
template <ActivationFormat kFormat>
__device__ void take_activations(const RowArgs& rows, const std::byte* record, int64_t row) {
  const int64_t k = rows.k;
  int64_t behind = k;  // where the values end
  if constexpr (kFormat == ActivationFormat::kNvfp4) {
    const OperandRow<Vec8> to(rows, row);
    for (int64_t i = threadIdx.x; i < k / 8; i += blockDim.x)
      to.put(i, vec8_of(reinterpret_cast<const uint32_t*>(record)[i], static_cast<uint32_t>(record[k / 2 + i / 2])));
    for (int64_t i = k / 8 + threadIdx.x; to.pads(i); i += blockDim.x) to.put(i, Vec8{});
    behind = k / 2 + k / 16;
  } else if constexpr (kFormat == ActivationFormat::kFp8) {
    const OperandRow<E4m3Vec8> to(rows, row);
    for (int64_t i = threadIdx.x; i < k / 8; i += blockDim.x) {
      const uint2 codes = reinterpret_cast<const uint2*>(record)[i];
      to.put(i, E4m3Vec8{{codes.x, codes.y}, false, false});
    }
    for (int64_t i = k / 8 + threadIdx.x; to.pads(i); i += blockDim.x) to.put(i, E4m3Vec8{});
  } else {
    copy_bytes(reinterpret_cast<std::byte*>(rows.out.bf16 + row * k), record, 2 * k);
    behind = 2 * k;
  }
  if (threadIdx.x != 0) return;
  if constexpr (kFormat != ActivationFormat::kBf16) {
    uint32_t scale = 0;  // at no address of its own alignment
#pragma unroll
    for (int i = 0; i < 4; ++i) scale |= static_cast<uint32_t>(record[behind + i]) << 8 * i;
    rows.out.row_scale[row] = __uint_as_float(scale);
    behind += 4;
  }
  rows.out.nonfinite[row] = record[behind] != std::byte{0};
}

// Reads the headers of all messages, with one warp. One that no rank writes is reported as a wrong record.
__device__ void look_at_headers(const TakeRecords& call) {
  int32_t most = -1;
  uint32_t pair = 0;  // home << 16 | owner
  for (int64_t home = thread_of_cta(); home < call.layout.world; home += 32) {
    const MessageHeader* const header =
        header_at(call.layout, const_cast<std::byte*>(call.messages), home, call.bounds[home]);
    if (header->most_rank < 0 || header->most_rank >= call.layout.world || header->tokens < 0 ||
        header->most_tokens < header->tokens) {
      atomicOr(call.failed, kWrong);
      atomicAdd(reinterpret_cast<unsigned long long*>(&call.report->wrong), 1ull);
      continue;
    }
    if (header->most_tokens <= most) continue;
    most = header->most_tokens;
    pair = static_cast<uint32_t>(home) << 16 | static_cast<uint32_t>(header->most_rank);
  }
  const int32_t most_of_all = __reduce_max_sync(kAllLanes, most);
  pair = __reduce_min_sync(kAllLanes, most == most_of_all ? pair : 0xFFFFFFFFu);
  if (thread_of_cta() != 0 || most_of_all <= call.capacity) return;
  atomicOr(call.failed, kOverflowed);
  atomicAdd(reinterpret_cast<unsigned long long*>(&call.report->runs), 1ull);
  atomicMax(reinterpret_cast<unsigned long long*>(&call.report->most),
            static_cast<unsigned long long>(most_of_all) << 32 | pair);
}

// The home of a record, and where its message's rows begin and end among all.
struct Home {
  int64_t rank, first_row, end_row;
  __device__ Home(const TakeRecords& call, int64_t record) {
    const int64_t world = call.layout.world;
    const int32_t* const bounds = call.bounds;
    int64_t low = 0, high = world - 1;  // the last whose first record is not behind this one
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (bounds[middle] <= record)
        low = middle;
      else
        high = middle - 1;
    }
    rank = low;
    first_row = bounds[world + 1 + rank], end_row = bounds[world + 2 + rank];
  }
};

// A record as its home has sent it.
struct Received {
  const std::byte* at = nullptr;
  const uint32_t* mark = nullptr;      // over peers
  int64_t first_row = 0, end_row = 0;  // of its rows among all, without peers; end_row: of its message's

  // By any thread; over peers the record is there only once came_over_peers says so.
  __device__ Received(const TakeRecords& call, int64_t index) {
    const WireRecord& record = call.layout.record;
    if (call.peers.record_stride > 0) {
      const int home = home_of(call, index);
      const int64_t in_region = home * call.peers.record_stride + index - call.peers.first_of_home[home];
      at = call.messages + in_region * record.bytes;
      mark = call.peers.marks + in_region;
      return;
    }
    const Home home(call, index);
    at = record_at(call.layout, const_cast<std::byte*>(call.messages), home.rank, index);
    first_row = home.first_row + *reinterpret_cast<const int32_t*>(at + record.first_row_at);
    end_row = first_row < home.first_row ? first_row : home.end_row;
  }
  __device__ static int home_of(const TakeRecords& call, int64_t index) {
    int home = 0;
    while (call.peers.first_of_home[home + 1] <= index) ++home;
    return home;
  }
  // Waits for the record's mark. By one thread.
  __device__ bool came_over_peers(const TakeRecords& call, int64_t index) const {
    if (mark == nullptr) return true;
    const uint32_t awaited = mark_of_records(call.wait.control);
    return wait_for_rank(
        call.wait, [&] { return home_of(call, index); }, [&] { return ptx::load_acquire_system(mark) == awaited; });
  }
};

// How many slots a record has, and whether they are all the rank's, with rows in their message.
struct OwnSlots {
  const int32_t* slots;
  int32_t own = 0;
  bool wrong;
  __device__ OwnSlots(const TakeRecords& call, const Received& record)
      : slots(reinterpret_cast<const int32_t*>(record.at + call.layout.record.slots_at)) {
    int32_t strangers = 0;
    const int32_t first = static_cast<int32_t>(call.range.first), end = first + static_cast<int32_t>(call.range.count);
    for (int64_t k = 0; k < call.layout.record.top_k; ++k) {
      own += slots[k] != -1;
      strangers += slots[k] != -1 && (slots[k] < first || slots[k] >= end);
    }
    const bool peers = call.peers.record_stride > 0;
    wrong = own > 0 && (strangers > 0 || (!peers && record.first_row + own > record.end_row));
  }
};

// The record's slots to the owner's batch, by every step-th thread from `lane` on; none of a record that is wrong or has not come.
__device__ void take_slots(const TakeRecords& call, const Received& record, const OwnSlots& slots, bool came,
                           int64_t index, int64_t lane, int64_t step) {
  const WireRecord& layout = call.layout.record;
  const int32_t first = static_cast<int32_t>(call.range.first), end = first + static_cast<int32_t>(call.range.count);
  for (int64_t k = lane; k < layout.top_k; k += step) {
    // Read a second time, of memory that its home can still write to over peers.
    const int32_t slot = slots.slots[k];
    call.ids[index * layout.top_k + k] = slots.wrong || !came || slot < first || slot >= end ? -1 : slot;
    call.weights[index * layout.top_k + k] = reinterpret_cast<const float*>(record.at + layout.weights_at)[k];
  }
  if (lane != 0) return;
  if (call.peers.record_stride == 0) call.first_rows[index] = static_cast<int32_t>(record.first_row);
  if (came && !slots.wrong) return;
  ptx::grid_dependency_wait();  // what begins the run has ended
  atomicOr(call.failed, came ? kWrong : kPeerIsLate);
  if (came) atomicAdd(reinterpret_cast<unsigned long long*>(&call.report->wrong), 1ull);
}

// All slots of few records to the owner's batch, a thread for each, whose reads do not wait for each other. Returns whether any record is
// wrong or has not come: then take_slots has to do it. By a CTA, over peers.
__device__ bool take_all_slots(const TakeRecords& call, int64_t records) {
  const WireRecord& layout = call.layout.record;
  const auto top_k = static_cast<int32_t>(layout.top_k), count = static_cast<int32_t>(records) * top_k;
  const auto first = static_cast<int32_t>(call.range.first), end = first + static_cast<int32_t>(call.range.count);
  bool slow = false;
  for (int32_t assignment = thread_of_cta(); assignment < count; assignment += threads_of_cta()) {
    const int32_t index = assignment / top_k, k = assignment % top_k;
    const Received record(call, index);
    const bool came = record.came_over_peers(call, index);
    const int32_t slot = reinterpret_cast<const int32_t*>(record.at + layout.slots_at)[k];
    const float weight = reinterpret_cast<const float*>(record.at + layout.weights_at)[k];
    slow |= !came || (slot != -1 && (slot < first || slot >= end));
    call.ids[assignment] = slot;
    call.weights[assignment] = weight;
  }
  return __syncthreads_or(slow) != 0;
}

// kRoutes: CTA 0 reads all slots and routes; its threads are as many as route wants, in two dimensions, of which the others use the
// first. Over peers a record's mark is all that is waited for: where homes are quicker than this rank, the kernel before need not
// have ended. What comes behind, gemm1's CTAs on every multiprocessor, begins only once all records are there.
template <ActivationFormat kFormat, bool kRoutes>
__global__ void __launch_bounds__(kRoutes ? kRouteLargeThreads : kRecordThreads, kRoutes ? 1 : 8)
    take_records_kernel(TakeArgs args, const __grid_constant__ RouteArgs route) {
  extern __shared__ uint4 route_shared[];
  const TakeRecords& call = args.call;
  const bool peers = call.peers.record_stride > 0;
  if (!peers) {
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
  }
  if (blockIdx.x == 0 && thread_of_cta() < 32 && call.layout.fixed) look_at_headers(call);
  if (kRoutes && blockIdx.x == 0) {
    if (!peers || take_all_slots(call, args.records)) {
      for (int64_t index = thread_of_cta(); index < args.records; index += threads_of_cta()) {
        const Received record(call, index);
        const bool came = record.came_over_peers(call, index);
        take_slots(call, record, OwnSlots(call, record), came, index, 0, 1);
      }
      __syncthreads();
    }
    if (peers) ptx::launch_dependents();
    route_by_one_cta(route, route_shared);
  } else {
    if (threadIdx.y != 0) return;
    const int64_t index = static_cast<int64_t>(blockIdx.x) - (kRoutes ? 1 : 0);
    const Received record(call, index);
    const bool came = !__syncthreads_or(threadIdx.x == 0 && !record.came_over_peers(call, index));
    if (peers) ptx::launch_dependents();
    const OwnSlots slots(call, record);
    if (!kRoutes) take_slots(call, record, slots, came, index, threadIdx.x, blockDim.x);
    if (came && slots.own > 0 && !slots.wrong) take_activations<kFormat>(args.rows, record.at, index);
  }
  if (peers) ptx::grid_dependency_wait();
}

// Until the first record of each home is there. What is late is found again, at once, by the CTA that takes it.
__global__ void __launch_bounds__(32) await_records_kernel(const __grid_constant__ TakeRecords call) {
  const auto home = static_cast<int>(threadIdx.x);
  if (home < call.layout.world && call.peers.first_of_home[home] < call.peers.first_of_home[home + 1])
    Received(call, call.peers.first_of_home[home]).came_over_peers(call, call.peers.first_of_home[home]);
  __syncwarp();
  ptx::launch_dependents();  // whose CTAs are not to wait in its place
  ptx::grid_dependency_wait();
}

// ---- rows back

__global__ void __launch_bounds__(kRecordThreads, 8) pack_rows_kernel(PackRows call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x == 0) add_counts(*call.home_status, *call.owner_status);
  const int64_t top_k = call.record.top_k, row_bytes = call.record.row_bytes, assignment = blockIdx.x * top_k;
  int64_t to = call.first_rows[blockIdx.x];
  for (int64_t k = 0; k < top_k; ++k) {
    if (call.ids[assignment + k] < 0) continue;
    const int64_t row = call.row_of_assignment[assignment + k];
    if (row >= 0)
      copy_bytes(call.messages + to * row_bytes, static_cast<const std::byte*>(call.rows_out) + row * row_bytes,
                 row_bytes);
    ++to;
  }
}

}  // namespace

Status take_records(const StepContext& owner, const LayerSteps& steps, const TakeRecords& call) {
  if (owner.batch.tokens == 0) return {};
  const DeviceGuard guard(owner.weights.device);
  NVFP4_MOE_TRY(guard.status());
  const MoeConfig& config = owner.weights.config;
  TakeArgs args{call, {}, owner.batch.tokens};
  args.rows.k = config->hidden_size;
  args.rows.out = owner.buffers.routed.hidden;
  args.rows.operand = Scratch(owner).hidden_operand;
  args.rows.operand_kind = owner.plan->operand;
  const RoutePlan& plan = owner.plan->route;
  const bool routes = plan.kernel == RouteKernel::kOneCta && plan.threads % kRecordThreads == 0;
  const auto records = static_cast<unsigned>(owner.batch.tokens);
  if (call.peers.record_stride > 0 && owner.batch.tokens > kWaitingCtas)
    NVFP4_MOE_TRY(launch<await_records_kernel>("await_records", 1u, 32, 0, owner.stream, call));
  const auto launch_as = [&]<ActivationFormat kFormat>() {
    if (!routes)
      return launch<take_records_kernel<kFormat, false>>("take_records", records, kRecordThreads, 0, owner.stream, args,
                                                         RouteArgs{});
    const dim3 threads(kRecordThreads, static_cast<unsigned>(plan.threads / kRecordThreads));
    return launch<take_records_kernel<kFormat, true>>("take_records", 1 + records, threads, plan.shared_bytes,
                                                      owner.stream, args, route_args(owner, steps.counters(owner)));
  };
  const auto take = [&] {
    switch (config->activation_format) {
      case ActivationFormat::kNvfp4: return launch_as.template operator()<ActivationFormat::kNvfp4>();
      case ActivationFormat::kFp8: return launch_as.template operator()<ActivationFormat::kFp8>();
      default: return launch_as.template operator()<ActivationFormat::kBf16>();
    }
  };
  NVFP4_MOE_TRY(take());
  return routes ? Status() : steps.route(owner);
}

Status pack_rows(int device, const PackRows& call, void* stream) {
  if (call.records == 0) return {};
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  return launch<pack_rows_kernel>("pack_rows", static_cast<unsigned>(call.records), kRecordThreads, 0, stream, call);
}

}  // namespace nvfp4_moe::cuda
