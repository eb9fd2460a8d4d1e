// What all_to_all does on a device between the layer's steps: tokens to records and back, rows to where they are asked
// for, and how a run finds that a rank had more tokens for another than a message holds.
//
// A rank is home of its own tokens and owner of its experts. Each function enqueues in a stream and returns: it allocates
// nothing, waits for nothing, and can be captured.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/layer_steps.h"
#include "backend/wire_record.h"
#include "core/peer_memory.h"

namespace nvfp4_moe {

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
