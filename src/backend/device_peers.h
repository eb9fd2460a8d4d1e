// What ranks do on devices that write into each other's memory: the steps of all_reduce and all_to_all that a library's
// calls would do else (device_exchange.h).
//
// Each function enqueues in a stream and returns; it allocates nothing and can be captured. The runs of one rank's link follow
// each other on its device, in the same order on all ranks.
//
//   all_to_all         push_tokens, or assign_rows and push_records; the owner's steps; push_rows; combine
//   small all_reduce   sum_small: one kernel, whose values have marks
//   large all_reduce   push_parts, meet, sum_shard, meet, take_totals
//
// Of a small sum, a record and a row each has a mark that says of which run it is, written behind its bytes; whoever reads them waits
// for that, and for no other one. In a large sum all ranks meet: what was written before a meeting is seen behind it.
//
// When a region may be written again: records once their owner has said that it has taken the last run's (PeerControl::taken);
// rows once their home sends its next records, behind its combine; parts and totals once their reader has come to the next
// run's first meeting. Pairs are of two runs by turns: whoever is through a run has seen all others begin it, and so end the one
// before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "backend/device_exchange.h"
#include "core/peer_memory.h"
#include "core/status.h"

namespace nvfp4_moe {

// Where a GPU is in its host, and which others it reaches: queried before ranks share memory, and named by a refusal.
struct DeviceTopology {
  // "0000:3B:00.0": the same in all processes of a host, whichever devices they see and in whichever order.
  Result<std::string> (*pci_address)(int device);
  // Whether device's kernels reach the memory of the one at that address.
  Result<PeerReach> (*reach)(int device, const std::string& pci_address);
};

extern const DeviceTopology kCudaTopology;  // in builds with NVFP4_MOE_WITH_CUDA, of all its backends

// Tokens at home -> a record in the region of each rank, at [home][token]. A rank without any of the token's experts gets slots of
// -1 alone.
struct PushRecords {
  PeerLink link;
  PeerAddresses records, marks;  // of each rank: (world, record_stride) records, and a uint32 for each
  int64_t record_stride = 0;     // records, and marks, from one home's first to the next one's
  WireRecord record;
  WireArray arrays[kWireArrays];           // of the tokens at home
  const int32_t* slots = nullptr;          // (T, k)
  const float* weights = nullptr;          // (T, k)
  const int32_t* first_of_rank = nullptr;  // (world + 1)
  int64_t tokens = 0;
  uint32_t* failed = nullptr;  // (1)
};

// Begins a run: *failed is 0, or says that an owner has not taken the last run's records in time, so that none can be written.
struct AssignRows {
  PeerLink link;
  const int32_t* slots = nullptr;        // (assignments)
  int32_t* row_of_assignment = nullptr;  // (assignments) where combine finds the rows that come back; -1: no slot
  int64_t assignments = 0;
  uint32_t* failed = nullptr;  // (1)
};

// Few tokens from ids to the records of all owners, in one kernel: the steps slots, route, assign_rows, quantize, push_records.
struct PushTokens {
  SlotsOfIds slots;
  PushRecords push;
};

// rows_out of the owner -> the rows region of their homes, at [token][k], and marks at [token][k] behind them.
struct PushRows {
  PeerLink link;
  PeerAddresses rows, marks;
  WireRecord record;
  const void* rows_out = nullptr;              // (R)
  const int32_t* row_of_assignment = nullptr;  // (records, k)
  const int32_t* ids = nullptr;                // (records, k)
  int64_t records = 0;
  PeerMessages messages;
  const RunStatus* owner = nullptr;  // whose counts are added to the home's; null: no records came
  bool counts_tokens = false;        // push_tokens has left what it has counted beside the home's status
};

// partial (count) fp32 of each rank -> out (count): added in the order of the ranks, rounded once to out's dtype.
struct PeerSum {
  PeerLink link;
  // Of sum_small, as many in each rank's part as the whole region has room for, whatever the count: two runs by turns
  // share nothing.
  PeerAddresses pairs;
  int64_t pair_stride = 0;  // pairs from one rank's first to the next one's
  PeerAddresses parts;      // of the others
  int64_t part_stride = 0;  // values from one rank's first to the next one's
  PeerAddresses totals;
  const float* partial = nullptr;
  int64_t count = 0;  // a multiple of 8
  void* out = nullptr;
  DType out_dtype = DType::kBf16;
  uint64_t* nonfinite = nullptr;  // (1) = how many of out are NaN or Inf
  uint32_t* failed = nullptr;     // (1) of many values: set by a meeting that failed; out is NaN then
};

struct DevicePeers {
  // Zeros, once it returns.
  Status (*clear)(int device, void* memory, int64_t size_bytes);
  // PeerControl::stop, beside whatever the device does.
  Status (*stop)(int device, PeerControl* control);
  // As it is, beside whatever devices do.
  Status (*read)(int device, const PeerControl* control, PeerControl* to);
  // For other processes; memory is what an allocation returned.
  Status (*share)(int device, void* memory, PeerHandle* handle);
  Result<void*> (*open)(int device, const PeerHandle& handle);
  void (*close)(int device, void* memory);
  // Lets device reach the memory of another one of this process.
  Status (*reach)(int device, int other);
  // Zeros in pinned host memory, and where the device reaches them.
  Status (*make_host_words)(int device, PeerHostWords** words, PeerHostWords** on_device);
  void (*drop_host_words)(int device, PeerHostWords* words);

  // failed (1): not 0 once a rank did not come; the first meeting of a run clears it.
  Status (*meet)(int device, const PeerLink& link, bool first, uint32_t* failed, void* stream);

  // Whether push_tokens takes a batch; for any other one these steps are called one by one.
  bool (*pushes_tokens)(const StepContext& home, const LayerSteps& steps);
  // What quantize counts is left to push_rows.
  Status (*push_tokens)(const StepContext& home, const LayerSteps& steps, const PushTokens& call);
  Status (*assign_rows)(int device, const AssignRows& call, void* stream);
  Status (*push_records)(int device, const PushRecords& call, void* stream);
  // With no records too: tells all homes that their records are taken, and adds to this home's status what is not there yet.
  Status (*push_rows)(const StepContext& home, const PushRows& call);
  Status (*sum_small)(int device, const PeerSum& call, void* stream);
  Status (*push_parts)(int device, const PeerSum& call, void* stream);
  Status (*sum_shard)(int device, const PeerSum& call, void* stream);
  Status (*take_totals)(int device, const PeerSum& call, void* stream);
};

extern const DevicePeers kCudaPeers;  // in builds with NVFP4_MOE_WITH_CUDA, of all its backends

}  // namespace nvfp4_moe
