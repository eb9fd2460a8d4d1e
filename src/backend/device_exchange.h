// The functions of a device for a layer over ranks: ids to slots, totals over ranks, and the packets of all_to_all.
//
// Each function enqueues in a stream and returns: it allocates nothing, does not synchronize, and can be captured.
//
// A token travels once to each rank that has experts of it:
//
//   record   activations | slots (k) int32 | weights (k) fp32 | first_row int32, rounded up to 16 bytes
//
// activations: the arrays of their format one after the other, all that gemm1 reads. slots: -1 if the assignment is not one
// of that rank's. The rows come back record by record, k by k: first_row is how many rows the message's earlier records
// ask for, so that a rank may work on any record without those before it. Between devices that write into each other's
// memory rows have places of their own, and first_row is neither written nor read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/layer_steps.h"
#include "core/batch.h"
#include "core/peer_memory.h"
#include "core/scale_layout.h"
#include "core/status.h"

namespace nvfp4_moe {

// One array of a token's activations: rows of row_bytes.
struct WireArray {
  void* rows = nullptr;
  int64_t row_bytes = 0;
  std::byte* row(int64_t token) const { return static_cast<std::byte*>(rows) + token * row_bytes; }
};
inline constexpr int kWireArrays = 4;  // at most; the others have no bytes

inline std::array<WireArray, kWireArrays> wire_arrays(const ActivationBuffers& activations, ActivationFormat format,
                                                      int64_t hidden) {
  const WireArray nonfinite{activations.nonfinite, 1}, row_scale{activations.row_scale, 4};
  switch (format) {
    case ActivationFormat::kNvfp4:
      return {{{activations.codes, hidden / 2}, {activations.block_scales, hidden / 16}, row_scale, nonfinite}};
    case ActivationFormat::kBf16: return {{{activations.bf16, 2 * hidden}, nonfinite, {}, {}}};
    case ActivationFormat::kInt8Block:
      return {{{activations.int8_codes, hidden}, {activations.int8_scales, hidden / 16 * 4}, nonfinite, {}}};
    case ActivationFormat::kFp8: return {{{activations.fp8, hidden}, row_scale, nonfinite, {}}};
  }
  return {};
}

// Where the parts of a record begin, and its size.
struct WireRecord {
  int64_t top_k = 0;
  int64_t slots_at = 0, weights_at = 0, first_row_at = 0;  // multiples of 4
  int64_t bytes = 0;                                       // a multiple of 16
  int64_t row_bytes = 0;                                   // of what comes back for each slot

  WireRecord() = default;
  explicit WireRecord(const MoeConfig& config) : top_k(config->top_k) {
    for (const WireArray& array : wire_arrays({}, config->activation_format, config->hidden_size))
      slots_at += array.row_bytes;
    slots_at = round_up(slots_at, sizeof(int32_t));
    weights_at = slots_at + top_k * 4;
    first_row_at = weights_at + top_k * 4;
    bytes = round_up(first_row_at + 4, 16);
    row_bytes = config->hidden_size * (config->row_format == RowFormat::kBf16 ? 2 : 4);
  }
};

// ids (tokens, top_k) -> slots, and load (num_experts) += how often each expert was chosen. An expert's slots take turns:
// assignment k of token t has turn home + t + k (parallel/placement.h). -1 stays -1; another id that is no expert's is -2.
struct SlotsOfIds {
  const void* ids = nullptr;  // (tokens, top_k)
  DType ids_dtype = DType::kI64;
  int64_t tokens = 0, top_k = 0, num_experts = 0, home = 0;
  const int32_t* first_of_expert = nullptr;  // (num_experts + 1) where an expert's slots begin below
  const int32_t* slots_of_expert = nullptr;  // (slots)
  int32_t* slots = nullptr;                  // (tokens, top_k)
  uint64_t* load = nullptr;                  // (num_experts)
};

// parts (ranks, count) fp32 -> out (count): added in the order of the ranks, rounded once to out's dtype.
struct SumOfRanks {
  const float* parts = nullptr;
  int64_t ranks = 0, count = 0;  // count: a multiple of 8
  void* out = nullptr;
  DType out_dtype = DType::kBf16;
};

// The last step of a sum over the ranks: *nonfinite = how many of values are NaN or Inf. If the ranks' link has failed, the
// sum is made of whatever was there; then all values become NaN first.
struct CheckSum {
  void* values = nullptr;  // (count)
  DType dtype = DType::kBf16;
  int64_t count = 0;  // a multiple of 8
  const uint32_t* link_failed =
      nullptr;                    // (1) in host memory: not 0 once the link has failed; null: it has no such word
  uint64_t* nonfinite = nullptr;  // (1)
};

struct DeviceRanks {
  Status (*slots_of_ids)(int device, const SlotsOfIds& call, void* stream);
  Status (*sum_of_ranks)(int device, const SumOfRanks& call, void* stream);
  Status (*check_sum)(int device, const CheckSum& call, void* stream);
  // A mark behind what the stream has been given: *mark, or where that is null a new one. Not for a stream that is being
  // captured.
  Status (*set_mark)(int device, void** mark, void* stream);
  // Whether the device has come to it; does not wait, and ends nobody's capture. Any thread.
  Result<bool> (*mark_reached)(int device, void* mark);
  void (*drop_mark)(int device, void* mark);
  // A word in pinned host memory, 0, and where the device reaches it. The host sets it without a call of CUDA's: one would wait
  // while another thread's launch waits for room in a queue that is stuck.
  Status (*make_host_word)(int device, uint32_t** word, uint32_t** on_device);
  void (*drop_host_word)(int device, uint32_t* word);
  // Calls body(argument) with the device as the thread's current one: for libraries that take it from there.
  Status (*on_device)(int device, Status (*body)(void* argument), void* argument);
};

extern const DeviceRanks kCudaRanks;  // in builds with NVFP4_MOE_WITH_CUDA, of all its backends

// Which record a message's next one is made of. token < 0: none, a record without slots.
struct RecordSource {
  int32_t token, rank, first_row;
};

// What begins a message of a fixed capacity. The counts are those of the home, whether they fit or not.
struct MessageHeader {
  int32_t tokens, rows;            // for this owner
  int32_t most_tokens, most_rank;  // for the owner that it has most for
};

// What owners find in the messages' headers, in device memory. Cleared by whoever reads it.
struct WireReport {
  uint64_t runs = 0;   // in which a rank had too many tokens for another
  uint64_t most = 0;   // the most that it was: tokens << 32 | home << 16 | owner
  uint64_t wrong = 0;  // records with slots that are none of the rank's, or rows beyond their message
};

// How a run's records and rows lie in memory: messages of all ranks behind each other, each behind its header.
// fixed: at home all are of `records` records and records * top_k rows, and at an owner each home's of its own number; else of
// as many as there are, without headers.
struct RecordLayout {
  WireRecord record;
  int64_t world = 0, records = 0;
  bool fixed = false;
  int64_t header_bytes = 0;

  RecordLayout() = default;
  RecordLayout(const WireRecord& record_, int64_t world_, int64_t records_, bool fixed_)
      : record(record_),
        world(world_),
        records(records_),
        fixed(fixed_),
        header_bytes(fixed ? static_cast<int64_t>(sizeof(MessageHeader)) : 0) {}
};

// counts (world, 2): tokens that have slots of each rank, and these slots.
struct CountRecords {
  const int32_t* slots = nullptr;          // (T, k); negative: none
  const int32_t* first_of_rank = nullptr;  // (world + 1) the first slot of each rank
  int64_t tokens = 0, top_k = 0, world = 0;
  int64_t* counts = nullptr;
};

// The records of all messages, in the order of the tokens, and where the rows of their slots will come to lie.
struct ScanRecords {
  RecordLayout layout;
  CountRecords counted;
  RecordSource* sources = nullptr;       // (records of all messages)
  int32_t* row_of_assignment = nullptr;  // (T, k) of those with a slot: its row; -1 where the message has no room
  std::byte* messages = nullptr;         // whose headers are written; null without them
  uint32_t* failed = nullptr;            // (1) = 0
};

struct PackRecords {
  RecordLayout layout;
  WireArray arrays[kWireArrays];           // of the tokens at home
  const int32_t* slots = nullptr;          // (T, k)
  const float* weights = nullptr;          // (T, k)
  const int32_t* first_of_rank = nullptr;  // (world + 1)
  const RecordSource* sources = nullptr;   // (records)
  int64_t records = 0;
  std::byte* messages = nullptr;
};

// Records that their homes have written into this rank's memory, and their marks: [home][token], record_stride from one
// home's first to the next one's. Of the owner's batch, a home's tokens begin at first_of_home.
struct PeerMessages {
  int64_t record_stride = 0;                   // 0: messages lie behind each other, as a RecordLayout says
  const uint32_t* marks = nullptr;             // (world, record_stride)
  int32_t first_of_home[kMostPeers + 1] = {};  // (world + 1)
};

// Records of all homes -> the owner's batch and what its gemm1 reads.
struct TakeRecords {
  RecordLayout layout;
  const std::byte* messages = nullptr;
  ExpertRange range;         // its slots
  int32_t* ids = nullptr;    // (records, k) the step's batch
  float* weights = nullptr;  // (records, k)
  PeerMessages peers;
  PeerWait wait;  // for the records of peers
  // Without peers:
  int32_t* first_rows = nullptr;    // (records) where a record's rows begin among all that go back
  const int32_t* bounds = nullptr;  // (2, world + 1) first record and first row of each home
  int64_t capacity = 0;             // of tokens from one rank to another, where they are in headers
  uint32_t* failed = nullptr;       // (1) set where a home had too many tokens, did not come, or a record is wrong
  WireReport* report = nullptr;
};

// rows_out of the owner -> rows as they go back.
struct PackRows {
  WireRecord record;
  const void* rows_out = nullptr;              // (R)
  const int32_t* row_of_assignment = nullptr;  // (records, k)
  const int32_t* ids = nullptr;                // (records, k)
  const int32_t* first_rows = nullptr;         // (records)
  int64_t records = 0;
  std::byte* messages = nullptr;
  // The owner's counts are added to the home's.
  RunStatus* home_status = nullptr;
  const RunStatus* owner_status = nullptr;
};

// What combine asks for besides, where rows come from other ranks: whether the run has failed, so that out is NaN and counted so.
struct AwaitedRows {
  uint32_t* failed = nullptr;             // (1) why out is NaN; 0: it is not
  const uint32_t* link_failed = nullptr;  // (1) as CheckSum has it; null: over peers
  // Over peers, whose rows combine waits for:
  PeerWait wait;
  int32_t world = 1;
  const uint32_t* marks = nullptr;         // (T, k) of the rows; null: they are there
  const int32_t* slots = nullptr;          // (T, k)
  const int32_t* first_of_rank = nullptr;  // (world + 1)
};

struct DeviceRecords {
  Status (*count)(int device, const CountRecords& call, void* stream);
  Status (*scan)(int device, const ScanRecords& call, void* stream);
  Status (*pack)(int device, const PackRecords& call, void* stream);
  // take and route. The owner's step: batch, buffers and scratch are those of the records that came.
  Status (*take)(const StepContext& owner, const LayerSteps& steps, const TakeRecords& call);
  Status (*pack_rows)(int device, const PackRows& call, void* stream);
  // values (count) -> to, by value: they may change when this returns.
  Status (*put)(int device, const int32_t* values, int64_t count, int32_t* to, void* stream);
};

extern const DeviceRecords kCudaRecords;  // in builds with NVFP4_MOE_WITH_CUDA, of all its backends

}  // namespace nvfp4_moe
