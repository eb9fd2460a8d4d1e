// Tokens to records of the wire and back, rows to where they are asked for (backend/device_records.h).
//
//   count, place    a CTA a rank counts its tokens and slots, then scans them: which record, which rows
//   pack, take      a CTA a record: activations as they are to the wire; from it, to what gemm1 reads
//   pack_rows       a CTA a record: the owner's rows to the places that the record names
//   finish          counts of home and owner; NaN to out where a rank had more tokens than fit
// Memory is the limit of pack, take and pack_rows; count and place read all slots once for each rank.
#include <cuda_runtime.h>

#include <algorithm>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/steps/formats.cuh"
#include "backend/cuda/steps/quantize.cuh"
#include "backend/cuda/steps/route.cuh"
#include "backend/device_records.h"

namespace nvfp4_moe::cuda {
namespace {

constexpr int kThreads = 128;       // of a record
constexpr int kScanThreads = 1024;  // of a rank's tokens, at most
constexpr int kFinishThreads = 256, kFinishElements = 8;
constexpr int64_t kFinishCtas = 1024;
constexpr int kPutWords = 256;
constexpr uint32_t kOverflowed = 1, kWrong = 2;  // why a run's out is NaN

// Record `record` of all messages; it is of rank's.
__device__ std::byte* record_at(const RecordLayout& layout, std::byte* messages, int64_t rank, int64_t record) {
  return messages + record * layout.record.bytes + (rank + 1) * layout.header_bytes;
}
__device__ MessageHeader* header_at(const RecordLayout& layout, std::byte* messages, int64_t rank) {
  return reinterpret_cast<MessageHeader*>(record_at(layout, messages, rank - 1, rank * layout.capacity));
}

// ---- count and place

// Slots of the rank among a token's.
__device__ int32_t slots_of(const CountRecords& call, int64_t token, int32_t first, int32_t end) {
  int32_t slots = 0;
  for (int64_t k = 0; k < call.top_k; ++k) {
    const int32_t slot = call.slots[token * call.top_k + k];
    slots += slot >= first && slot < end;
  }
  return slots;
}

__global__ void __launch_bounds__(kScanThreads) count_records(CountRecords call) {
  __shared__ int32_t sums[2];
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (threadIdx.x < 2) sums[threadIdx.x] = 0;
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
    atomicAdd(sums, tokens);
    atomicAdd(sums + 1, rows);
  }
  __syncthreads();
  if (threadIdx.x < 2) call.counts[rank * 2 + threadIdx.x] = sums[threadIdx.x];
}

// By one warp: where this rank's records and rows begin among all, and the header of its message.
struct MessageStart {
  int32_t records, rows;
  __device__ MessageStart(const PlaceRecords& call, int64_t rank) {
    const int64_t lane = threadIdx.x % 32, world = call.layout.world;
    int32_t before = 0, rows_before = 0, most = -1, most_rank = 0;
    for (int64_t r = lane; r < world; r += 32) {
      const auto tokens = static_cast<int32_t>(call.counted.counts[r * 2]);
      if (r < rank) before += tokens, rows_before += static_cast<int32_t>(call.counted.counts[r * 2 + 1]);
      if (tokens > most) most = tokens, most_rank = static_cast<int32_t>(r);
    }
    records = __reduce_add_sync(kAllLanes, before);
    rows = __reduce_add_sync(kAllLanes, rows_before);
    const int32_t most_of_all = __reduce_max_sync(kAllLanes, most);
    most_rank = __reduce_min_sync(kAllLanes, most == most_of_all ? most_rank : 0x7FFFFFFF);
    if (!call.layout.fixed) return;
    records = static_cast<int32_t>(rank * call.layout.capacity);
    rows = static_cast<int32_t>(records * call.counted.top_k);
    if (lane != 0) return;
    const int64_t* const own = call.counted.counts + rank * 2;
    *header_at(call.layout, call.messages, rank) = {static_cast<int32_t>(own[0]), static_cast<int32_t>(own[1]),
                                                    most_of_all, most_rank};
  }
};

__global__ void __launch_bounds__(kScanThreads) place_records(PlaceRecords call) {
  __shared__ Totals warp_totals[32];
  __shared__ int32_t starts[2];
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const CountRecords& counted = call.counted;
  const int64_t rank = blockIdx.x, top_k = counted.top_k;
  if (threadIdx.x < 32) {
    const MessageStart start(call, rank);
    starts[0] = start.records, starts[1] = start.rows;
    if (rank == 0) *call.failed = 0;
  }
  __syncthreads();
  const int32_t first = counted.first_of_rank[rank], end = counted.first_of_rank[rank + 1];
  Totals before;  // rows, and in place of tiles records
  for (int64_t next = 0; next < counted.tokens; next += blockDim.x) {
    const int64_t token = next + threadIdx.x;
    Totals own, total;
    if (token < counted.tokens) own.rows = slots_of(counted, token, first, end);
    own.tiles = own.rows > 0;
    const Totals at = cta_exclusive(own, warp_totals, total);
    const int32_t record = before.tiles + at.tiles, first_row = before.rows + at.rows;
    before.tiles += total.tiles, before.rows += total.rows;
    if (own.rows == 0) continue;
    const bool fits = record < call.layout.capacity;
    if (fits) call.sources[starts[0] + record] = {static_cast<int32_t>(token), static_cast<int32_t>(rank), first_row};
    int32_t row = starts[1] + first_row;
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t slot = counted.slots[token * top_k + k];
      if (slot >= first && slot < end) call.row_of_assignment[token * top_k + k] = fits ? row++ : -1;
    }
  }
  if (!call.layout.fixed) return;
  for (int64_t i = before.tiles + threadIdx.x; i < call.layout.capacity; i += blockDim.x)
    call.sources[starts[0] + i] = {-1, static_cast<int32_t>(rank), 0};
}

// ---- pack

__device__ void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  const auto misaligned = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
  if (misaligned % 16 == 0) {
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < bytes / 16; i += kThreads)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  } else if (misaligned % 8 == 0) {
    for (int64_t i = threadIdx.x; i < bytes / 8; i += kThreads)
      reinterpret_cast<uint2*>(to)[i] = reinterpret_cast<const uint2*>(from)[i];
  } else {
    for (int64_t i = threadIdx.x; i < bytes; i += kThreads) to[i] = from[i];
  }
}

__global__ void __launch_bounds__(kThreads) pack_records(PackRecords call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const WireRecord& record = call.layout.record;
  const RecordSource source = call.sources[blockIdx.x];
  std::byte* const to = record_at(call.layout, call.messages, source.rank, blockIdx.x);
  const int32_t first = call.first_of_rank[source.rank], end = call.first_of_rank[source.rank + 1];
  const int64_t assignment = source.token * record.top_k;
  for (int64_t k = threadIdx.x; k < record.top_k; k += kThreads) {
    const int32_t slot = source.token < 0 ? -1 : call.slots[assignment + k];
    const bool own = slot >= first && slot < end;
    reinterpret_cast<int32_t*>(to + record.slots_at)[k] = own ? slot : -1;
    reinterpret_cast<float*>(to + record.weights_at)[k] = own ? call.weights[assignment + k] : 0;
  }
  if (threadIdx.x == 0) *reinterpret_cast<int32_t*>(to + record.first_row_at) = source.first_row;
  if (source.token < 0) return;
  int64_t offset = 0;
#pragma unroll
  for (const WireArray& array : call.arrays) {
    const auto* const row = static_cast<const std::byte*>(array.rows) + source.token * array.row_bytes;
    if (array.row_bytes > 0) copy_bytes(to + offset, row, array.row_bytes);
    offset += array.row_bytes;
  }
  for (int64_t i = offset + threadIdx.x; i < record.slots_at; i += kThreads) to[i] = std::byte{0};
  for (int64_t i = record.first_row_at + 4 + threadIdx.x; i < record.bytes; i += kThreads) to[i] = std::byte{0};
}

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
    for (int64_t i = threadIdx.x; i < k / 8; i += kThreads)
      to.put(i, vec8_of(reinterpret_cast<const uint32_t*>(record)[i], static_cast<uint32_t>(record[k / 2 + i / 2])));
    for (int64_t i = k / 8 + threadIdx.x; to.pads(i); i += kThreads) to.put(i, Vec8{});
    behind = k / 2 + k / 16;
  } else if constexpr (kFormat == ActivationFormat::kFp8) {
    const OperandRow<E4m3Vec8> to(rows, row);
    for (int64_t i = threadIdx.x; i < k / 8; i += kThreads) {
      const uint2 codes = reinterpret_cast<const uint2*>(record)[i];
      to.put(i, E4m3Vec8{{codes.x, codes.y}, false, false});
    }
    for (int64_t i = k / 8 + threadIdx.x; to.pads(i); i += kThreads) to.put(i, E4m3Vec8{});
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
    const MessageHeader* const header = header_at(call.layout, const_cast<std::byte*>(call.messages), home);
    if (header->most_tokens <= most) continue;
    most = header->most_tokens;
    pair = static_cast<uint32_t>(home) << 16 | static_cast<uint32_t>(header->most_rank);
  }
  const int32_t most_of_all = __reduce_max_sync(kAllLanes, most);
  pair = __reduce_min_sync(kAllLanes, most == most_of_all ? pair : 0xFFFFFFFFu);
  if (threadIdx.x != 0 || most_of_all <= call.layout.capacity) return;
  atomicOr(call.failed, kOverflowed);
  atomicAdd(reinterpret_cast<unsigned long long*>(&call.report->runs), 1ull);
  atomicMax(reinterpret_cast<unsigned long long*>(&call.report->most),
            static_cast<unsigned long long>(most_of_all) << 32 | pair);
}

// The home of a record, and where its message's rows begin and end among all.
struct Home {
  int64_t rank, first_row, end_row;
  __device__ Home(const TakeRecords& call, int64_t record) {
    const RecordLayout& layout = call.layout;
    const int32_t* const bounds = call.bounds;
    if (bounds == nullptr) {
      rank = record / layout.capacity;
      first_row = rank * layout.capacity * layout.record.top_k;
      end_row = first_row + layout.capacity * layout.record.top_k;
      return;
    }
    int64_t low = 0, high = layout.world - 1;  // the last whose first record is not behind this one
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (bounds[middle] <= record)
        low = middle;
      else
        high = middle - 1;
    }
    rank = low;
    first_row = bounds[layout.world + 1 + rank], end_row = bounds[layout.world + 2 + rank];
  }
};

template <ActivationFormat kFormat>
__global__ void __launch_bounds__(kThreads) take_records(TakeArgs args) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const TakeRecords& call = args.call;
  const WireRecord& record = call.layout.record;
  if (blockIdx.x == 0 && threadIdx.x < 32 && call.layout.fixed) look_at_headers(call);
  const int64_t index = blockIdx.x, top_k = record.top_k;
  const Home home(call, index);
  const std::byte* const from = record_at(call.layout, const_cast<std::byte*>(call.messages), home.rank, index);
  const auto* const slots = reinterpret_cast<const int32_t*>(from + record.slots_at);
  const int64_t first_row = home.first_row + *reinterpret_cast<const int32_t*>(from + record.first_row_at);
  int32_t own = 0, strangers = 0;
  for (int64_t k = 0; k < top_k; ++k) {
    own += slots[k] != -1;
    strangers += slots[k] != -1 && (slots[k] < call.range.first || slots[k] >= call.range.first + call.range.count);
  }
  const bool wrong = own > 0 && (strangers > 0 || first_row < home.first_row || first_row + own > home.end_row);
  for (int64_t k = threadIdx.x; k < top_k; k += kThreads) {
    call.ids[index * top_k + k] = wrong ? -1 : slots[k];
    call.weights[index * top_k + k] = reinterpret_cast<const float*>(from + record.weights_at)[k];
  }
  if (threadIdx.x == 0) {
    call.first_rows[index] = static_cast<int32_t>(first_row);
    if (wrong) {
      atomicOr(call.failed, kWrong);
      atomicAdd(reinterpret_cast<unsigned long long*>(&call.report->wrong), 1ull);
    }
  }
  if (own > 0 && !wrong) take_activations<kFormat>(args.rows, from, index);
}

// ---- rows back

__global__ void __launch_bounds__(kThreads) pack_rows(PackRows call) {
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

// ---- finish

template <DType kOut>
__global__ void __launch_bounds__(kFinishThreads) finish_run(FinishRun call) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  const bool failed = *call.failed != 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    RunStatus status = *call.home;
    if (call.owner != nullptr) {
      status.nonfinite_rows += call.owner->nonfinite_rows;
      status.intermediate_blocks += call.owner->intermediate_blocks;
      status.intermediate_saturated += call.owner->intermediate_saturated;
      status.intermediate_zeroed += call.owner->intermediate_zeroed;
    }
    if (failed) status.nonfinite_outputs = static_cast<uint64_t>(call.count);
    *call.status = status;
  }
  if (!failed) return;
  const int64_t step = int64_t{gridDim.x} * kFinishThreads;
  for (int64_t i = int64_t{blockIdx.x} * kFinishThreads + threadIdx.x; i < call.count; i += step)
    store_element<kOut>(call.out, i, __uint_as_float(0x7FC00000u));
}

struct Words {
  int32_t values[kPutWords];
};
__global__ void __launch_bounds__(kPutWords) put_words(Words words, int32_t count, int32_t* to) {
  ptx::grid_dependency_wait();
  ptx::launch_dependents();
  if (static_cast<int32_t>(threadIdx.x) < count) to[threadIdx.x] = words.values[threadIdx.x];
}

// ---- launches

unsigned scan_threads(int64_t tokens) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(tokens, 32) * 32, 32, kScanThreads));
}

Status count(int device, const CountRecords& call, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  return launch<count_records>("count_records", static_cast<unsigned>(call.world), scan_threads(call.tokens), 0, stream,
                               call);
}

Status place(int device, const PlaceRecords& call, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  return launch<place_records>("place_records", static_cast<unsigned>(call.layout.world),
                               scan_threads(call.counted.tokens), 0, stream, call);
}

Status pack(int device, const PackRecords& call, void* stream) {
  if (call.records == 0) return {};
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  return launch<pack_records>("pack_records", static_cast<unsigned>(call.records), kThreads, 0, stream, call);
}

Status take(const StepContext& owner, const TakeRecords& call) {
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
      return launch<take_records<ActivationFormat::kNvfp4>>("take_records", records, kThreads, 0, owner.stream, args);
    case ActivationFormat::kFp8:
      return launch<take_records<ActivationFormat::kFp8>>("take_records", records, kThreads, 0, owner.stream, args);
    default:
      return launch<take_records<ActivationFormat::kBf16>>("take_records", records, kThreads, 0, owner.stream, args);
  }
}

Status pack_rows_of(int device, const PackRows& call, void* stream) {
  if (call.records == 0) return {};
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  return launch<pack_rows>("pack_rows", static_cast<unsigned>(call.records), kThreads, 0, stream, call);
}

Status finish(int device, const FinishRun& call, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const int64_t threads = ceil_div(call.count, kFinishElements);
  const auto ctas = static_cast<unsigned>(std::clamp<int64_t>(ceil_div(threads, kFinishThreads), 1, kFinishCtas));
  switch (call.out_dtype) {
    case DType::kF32: return launch<finish_run<DType::kF32>>("finish_run", ctas, kFinishThreads, 0, stream, call);
    case DType::kF16: return launch<finish_run<DType::kF16>>("finish_run", ctas, kFinishThreads, 0, stream, call);
    default: return launch<finish_run<DType::kBf16>>("finish_run", ctas, kFinishThreads, 0, stream, call);
  }
}

Status put(int device, const int32_t* values, int64_t count, int32_t* to, void* stream) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  for (int64_t first = 0; first < count; first += kPutWords) {
    const auto words = static_cast<int32_t>(std::min<int64_t>(kPutWords, count - first));
    Words chunk{};
    std::copy_n(values + first, words, chunk.values);
    NVFP4_MOE_TRY(launch<put_words>("put_words", 1u, kPutWords, 0, stream, chunk, words, to + first));
  }
  return {};
}

constexpr DeviceRecords kRecords = {count, place, pack, take, pack_rows_of, finish, put};

}  // namespace
}  // namespace nvfp4_moe::cuda

namespace nvfp4_moe {
constinit const DeviceRecords kCudaRecords = cuda::kRecords;
}
