// The steps of all_reduce and all_to_all between devices that write into each other's memory.
// Without peer memory NCCL does them (device_exchange.h).
//
// Each function enqueues in a stream and returns; it allocates nothing and can be captured. The
// runs of one rank's link follow each other on its device, in the same order on all ranks.
//
//   all_to_all         push_tokens, or assign_rows and push_packets; the expert rank's steps;
//                      push_rows; combine
//   small all_reduce   sum_small: one kernel, whose values carry flags
//   large all_reduce   push_parts, barrier, sum_shard, barrier, take_totals
//
// Each value of a small sum, packet and row carries a flag with the run's number, written after its
// bytes. Readers poll that flag only. A large sum uses barriers: writes before a barrier are
// visible after it.
//
// When a region may be written again:
//   packets          after their expert rank has reported that it took those of the last run
//                    (PeerControl::taken)
//   rows             after their source rank sends its next packets, which it does after its
//                    combine
//   parts, totals    after their reader has reached the next run's first barrier
//   pairs            double-buffered: a rank that has finished a run has seen all others begin it,
//                    and so end the one before
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "backend/device_exchange.h"
#include "core/peer_memory.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// A GPU's address in its host, and which other GPUs it reaches: queried before ranks share memory,
// and reported on failure.
struct DeviceTopology {
  // "0000:3B:00.0": the same in all processes of a host, whichever devices they see and in
  // whichever order.
  Result<std::string> (*pci_address)(int device);
  // Whether device's kernels reach the memory of the one at that address.
  Result<PeerReach> (*reach)(int device, const std::string& pci_address);
};

extern const DeviceTopology
    kCudaTopology;  // in builds with NVFP4_MOE_WITH_CUDA, of all its backends

// A source rank's tokens -> a packet in the region of each rank, at [source rank][token]. If a rank
// has no expert of the token, all slots are -1.
struct PushPackets {
  PeerLink link;
  PeerAddresses packets,
      flags;                  // of each rank: (world, packet_stride) packets, and a uint32 for each
  int64_t packet_stride = 0;  // packets, and flags, from one source rank's first to the next one's
  PacketFormat packet;
  WireArray arrays[kWireArrays];           // of the source rank's tokens
  const int32_t* slots = nullptr;          // (T, k)
  const float* weights = nullptr;          // (T, k)
  const int32_t* first_of_rank = nullptr;  // (world + 1)
  int64_t tokens = 0;
  uint32_t* failed = nullptr;  // (1)
};

// Begins a run. *failed = 0, or kPeerIsLate if an expert rank has not taken the last run's packets
// in time, so that none can be written.
struct AssignRows {
  PeerLink link;
  const int32_t* slots = nullptr;  // (assignments)
  // (assignments) where combine finds the rows that come back; -1: no slot
  int32_t* row_of_assignment = nullptr;
  int64_t assignments = 0;
  uint32_t* failed = nullptr;  // (1)
};

// A small batch from ids to packets for all expert ranks, in one kernel: slots, route, assign_rows,
// quantize, push_packets.
struct PushTokens {
  SlotsOfIds slots;
  PushPackets push;
};

// rows_out of the expert rank -> the rows region of their source ranks, at [token][k], then flags
// at [token][k].
struct PushRows {
  PeerLink link;
  PeerAddresses rows, flags;
  PacketFormat packet;
  const void* rows_out = nullptr;              // (R)
  const int32_t* row_of_assignment = nullptr;  // (packets, k)
  const int32_t* ids = nullptr;                // (packets, k)
  int64_t packets = 0;
  PeerMessages messages;
  // added to the source rank's counts; null: no packets arrived
  const RunStatus* expert_status = nullptr;
  bool counts_tokens = false;  // push_tokens has left its counts per token
};

// partial (count) fp32 of each rank -> out (count): added in the order of the ranks, rounded once
// to out's dtype.
struct PeerSum {
  PeerLink link;
  // sum_small: pair_stride depends on the region's size, not on count, so that two successive runs
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
  uint32_t* failed = nullptr;  // (1) of many values: set by a barrier that failed; out is NaN then
};

struct DevicePeers {
  // Clears the memory. Synchronous.
  Status (*clear)(int device, void* memory, int64_t size_bytes);
  // Sets PeerControl::stop while other kernels may run.
  Status (*stop)(int device, PeerControl* control);
  // Copies it while kernels may write to it.
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

  // failed (1): not 0 if a rank is late; the first barrier of a run clears it.
  Status (*barrier)(int device, const PeerLink& link, bool first, uint32_t* failed, void* stream);

  // Whether push_tokens takes a batch; for any other one these steps are called one by one.
  bool (*pushes_tokens)(const StepContext& source, const LayerSteps& steps);
  // Keeps quantize's counts for push_rows.
  Status (*push_tokens)(const StepContext& source, const LayerSteps& steps, const PushTokens& call);
  Status (*assign_rows)(int device, const AssignRows& call, void* stream);
  Status (*push_packets)(int device, const PushPackets& call, void* stream);
  // Called without packets too: reports to all source ranks that their packets are taken, and
  // completes this rank's status.
  Status (*push_rows)(const StepContext& source, const PushRows& call);
  Status (*sum_small)(int device, const PeerSum& call, void* stream);
  Status (*push_parts)(int device, const PeerSum& call, void* stream);
  Status (*sum_shard)(int device, const PeerSum& call, void* stream);
  Status (*take_totals)(int device, const PeerSum& call, void* stream);
};

extern const DevicePeers kCudaPeers;  // in builds with NVFP4_MOE_WITH_CUDA, of all its backends

}  // namespace nvfp4_moe::internal
