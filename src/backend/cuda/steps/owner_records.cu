// Records to what the owner's gemm1 reads, and its rows to where the records ask for them (backend/device_records.h).
//
// A CTA has a record. Codes and block scales become the operand that quantize would have made of the token; slots of other
// ranks and rows beyond their message are found here. Memory is the limit.
#include <cuda_runtime.h>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/records.cuh"
#include "backend/cuda/steps/records.h"
#include "backend/cuda/steps/small_batch.cuh"

namespace nvfp4_moe::cuda {
namespace {

// ---- take

struct TakeArgs {
  TakeRecords call;
  RowArgs rows;  // of the owner's hidden
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
    for (int64_t i = threadIdx.x; i < k / 8; i += kRecordThreads)
      to.put(i, vec8_of(reinterpret_cast<const uint32_t*>(record)[i], static_cast<uint32_t>(record[k / 2 + i / 2])));
    for (int64_t i = k / 8 + threadIdx.x; to.pads(i); i += kRecordThreads) to.put(i, Vec8{});
    behind = k / 2 + k / 16;
  } else if constexpr (kFormat == ActivationFormat::kFp8) {
    const OperandRow<E4m3Vec8> to(rows, row);
    for (int64_t i = threadIdx.x; i < k / 8; i += kRecordThreads) {
      const uint2 codes = reinterpret_cast<const uint2*>(record)[i];
      to.put(i, E4m3Vec8{{codes.x, codes.y}, false, false});
    }
    for (int64_t i = k / 8 + threadIdx.x; to.pads(i); i += kRecordThreads) to.put(i, E4m3Vec8{});
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
  rows.out.nonfinite[row] = static_cast<uint8_t>(record[behind]);
}

// By one warp: the headers of all messages.
__device__ void look_at_headers(const TakeRecords& call) {
  int32_t most = -1;
  uint32_t pair = 0;  // home << 16 | owner
  for (auto home = static_cast<int64_t>(threadIdx.x); home < call.layout.world; home += 32) {
    const MessageHeader* const header =
        header_at(call.layout, const_cast<std::byte*>(call.messages), home, call.bounds[home]);
    if (header->most_tokens <= most) continue;
    most = header->most_tokens;
    pair = static_cast<uint32_t>(home) << 16 | static_cast<uint32_t>(header->most_rank);
  }
  const int32_t most_of_all = __reduce_max_sync(kAllLanes, most);
  pair = __reduce_min_sync(kAllLanes, most == most_of_all ? pair : 0xFFFFFFFFu);
  if (threadIdx.x != 0 || most_of_all <= call.capacity) return;
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

template <ActivationFormat kFormat>
__global__ void __launch_bounds__(kRecordThreads, 8) take_records_kernel(TakeArgs args) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const TakeRecords& call = args.call;
  const WireRecord& record = call.layout.record;
  if (blockIdx.x == 0 && threadIdx.x < 32 && call.layout.fixed) look_at_headers(call);
  const int64_t index = blockIdx.x, top_k = record.top_k;
  const bool peers = call.peers.record_stride > 0;
  const std::byte* from;
  int64_t first_row = 0, end_row = 0;
  if (peers) {
    int home = 0;
    while (call.peers.first_of_home[home + 1] <= index) ++home;
    from = call.messages + (home * call.peers.record_stride + index - call.peers.first_of_home[home]) * record.bytes;
  } else {
    const Home home(call, index);
    from = record_at(call.layout, const_cast<std::byte*>(call.messages), home.rank, index);
    first_row = home.first_row + *reinterpret_cast<const int32_t*>(from + record.first_row_at);
    end_row = first_row < home.first_row ? first_row : home.end_row;
    if (threadIdx.x == 0) call.first_rows[index] = static_cast<int32_t>(first_row);
  }
  const auto* const slots = reinterpret_cast<const int32_t*>(from + record.slots_at);
  int32_t own = 0, strangers = 0;
  for (int64_t k = 0; k < top_k; ++k) {
    own += slots[k] != -1;
    strangers += slots[k] != -1 && (slots[k] < call.range.first || slots[k] >= call.range.first + call.range.count);
  }
  const bool wrong = own > 0 && (strangers > 0 || (!peers && first_row + own > end_row));
  for (int64_t k = threadIdx.x; k < top_k; k += kRecordThreads) {
    call.ids[index * top_k + k] = wrong ? -1 : slots[k];
    call.weights[index * top_k + k] = reinterpret_cast<const float*>(from + record.weights_at)[k];
  }
  if (threadIdx.x == 0 && wrong) {
    atomicOr(call.failed, kWrong);
    atomicAdd(reinterpret_cast<unsigned long long*>(&call.report->wrong), 1ull);
  }
  if (own > 0 && !wrong) take_activations<kFormat>(args.rows, from, index);
}

// ---- rows back

__global__ void __launch_bounds__(kRecordThreads, 8) pack_rows_kernel(PackRows call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
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

Status take_records(const StepContext& owner, const TakeRecords& call) {
  if (owner.batch.tokens == 0) return {};
  const DeviceGuard guard(owner.weights.device);
  NVFP4_MOE_TRY(guard.status());
  const MoeConfig& config = owner.weights.config;
  TakeArgs args{call, {}};
  args.rows.k = config->hidden_size;
  args.rows.out = owner.buffers.routed.hidden;
  args.rows.operand = Scratch(owner).hidden_operand;
  args.rows.operand_kind = owner.plan->operand;
  const auto records = static_cast<unsigned>(owner.batch.tokens);
  switch (config->activation_format) {
    case ActivationFormat::kNvfp4:
      return launch<take_records_kernel<ActivationFormat::kNvfp4>>("take_records", records, kRecordThreads, 0,
                                                                   owner.stream, args);
    case ActivationFormat::kFp8:
      return launch<take_records_kernel<ActivationFormat::kFp8>>("take_records", records, kRecordThreads, 0,
                                                                 owner.stream, args);
    default:
      return launch<take_records_kernel<ActivationFormat::kBf16>>("take_records", records, kRecordThreads, 0,
                                                                  owner.stream, args);
  }
}

Status pack_rows(int device, const PackRows& call, void* stream) {
  if (call.records == 0) return {};
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  return launch<pack_rows_kernel>("pack_rows", static_cast<unsigned>(call.records), kRecordThreads, 0, stream, call);
}

}  // namespace nvfp4_moe::cuda
