// The steps of all_reduce and all_to_all between devices that write into each other's memory.
// Without peer memory NCCL is used instead (device_exchange.h).
//
// Each function enqueues in a stream and returns. It allocates nothing and can be captured. Runs
// over one link execute one after another on each device, in the same order on all ranks.
//
//   all_to_all         push_tokens, or assign_rows and push_packets; the expert rank's steps;
//                      push_rows; combine
//   small all_reduce   sum_small: one kernel, whose values carry flags
//   large all_reduce   sum_large: push parts, barrier, sum a shard, barrier, take totals
//
// Each value of a small sum, packet and row carries a flag with the run's number, written after its
// bytes. Readers poll only that flag. A large sum uses barriers: writes before a barrier are
// visible after it.
//
// When a region may be written again:
//   packets          after their expert rank has reported that it took those of the last run
//                    (PeerControl::taken)
//   rows             after their source rank sends its next packets, which it does after its
//                    combine
//   parts, totals    after their reader has reached the next run's first barrier
//   pairs            double-buffered: a rank that finishes run n has seen all ranks start run n, so
//                    all have finished run n - 1
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backend/device_exchange.h"
#include "core/peer_device.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// Writes one packet per token of the source rank to the region of each rank, at [source
// rank][token]. If a rank has no expert of the token, all slots of its packet are -1.
struct PushPackets {
  PeerLink link;
  PeerAddresses packets,
      flags;                  // of each rank: (world, packet_stride) packets, and one uint32 each
  int64_t packet_stride = 0;  // distance between two source ranks' first packets, and first flags
  PacketFormat packet;
  TokensToSend from;
  int64_t tokens = 0;
  uint32_t* failed = nullptr;  // (1)
};

// Begins a run. *failed = 0, or kPeerIsLate if an expert rank has not taken the last run's packets
// in time; then no packets can be written.
struct AssignRows {
  PeerLink link;
  const int32_t* slots = nullptr;  // (assignments)
  // (assignments) index of the row that comes back, for combine; -1: no slot
  int32_t* row_of_assignment = nullptr;
  int64_t assignments = 0;
  uint32_t* failed = nullptr;  // (1)
};

// Takes a small batch from ids to packets for all expert ranks in one kernel: slots, route,
// assign_rows, quantize, push_packets.
struct PushTokens {
  SlotsOfIds slots;
  PushPackets push;
};

// Writes rows_out of the expert rank to the source ranks' rows regions, at [token][k], then the
// flags at [token][k].
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

// partial (count) fp32 of each rank -> out (count): added in rank order, rounded once to out's
// dtype.
struct PeerSum {
  PeerLink link;
  // sum_small: pair_stride depends on the region's size, not on count, so that two successive runs
  // never overlap.
  PeerAddresses pairs;
  int64_t pair_stride = 0;  // distance in pairs between two ranks' first pairs
  PeerAddresses parts;      // of each rank: partials of the other ranks
  int64_t part_stride = 0;  // distance in values between two ranks' first parts
  PeerAddresses totals;
  const float* partial = nullptr;
  int64_t count = 0;  // a multiple of 8
  void* out = nullptr;
  DType out_dtype = DType::kBf16;
  uint64_t* nonfinite = nullptr;  // (1) number of outputs that are NaN or Inf
  // (1) large sum: nonzero if a rank is late at a barrier; then out is NaN
  uint32_t* failed = nullptr;
};

struct DevicePeers {
  std::unique_ptr<PeerDevice> (*make_device)(int device);

  // Whether push_tokens takes this batch. If not, its steps are called one by one.
  bool (*pushes_tokens)(const StepContext& source, const LayerSteps& steps);
  // Keeps the counts of quantize for push_rows.
  Status (*push_tokens)(const StepContext& source, const LayerSteps& steps, const PushTokens& call);
  Status (*assign_rows)(int device, const AssignRows& call, void* stream);
  Status (*push_packets)(int device, const PushPackets& call, void* stream);
  // Called even without packets: reports to all source ranks that their packets are taken, and
  // completes this rank's status.
  Status (*push_rows)(const StepContext& source, const PushRows& call);
  Status (*sum_small)(int device, const PeerSum& call, void* stream);
  Status (*sum_large)(int device, const PeerSum& call, void* stream);
};

// in builds with NVFP4_MOE_WITH_CUDA; all CUDA backends share it
extern const DevicePeers kCudaPeers;

}  // namespace nvfp4_moe::internal
