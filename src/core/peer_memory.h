// Peer memory: device memory shared between the GPUs of one host, as a rank's kernels see it. It
// consists of addresses that kernels may write to, and words by which ranks report progress to each
// other.
//
// All of it is device memory, cleared at first, except PeerHostWords: pinned memory of the rank's
// own host.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvfp4_moe::internal {

// The most ranks whose devices write into each other's memory, all on one host. Their addresses are
// passed as a kernel argument.
inline constexpr int kMostPeers = 16;

// Regions by purpose. Each has its own memory, because the rule that protects it from early writes
// (backend/device_peers.h) holds only if nothing else is stored there. Layers of different sizes
// share the regions. Flags are separate from data, so that no layer's data is taken for a flag.
enum class PeerRegion : uint8_t {
  kControl,      // PeerControl
  kPackets,      // (world, a rank's tokens) packets of all_to_all, from each source rank
  kPacketFlags,  // (world, a rank's tokens) uint32: the dispatch whose packet has arrived
  kRows,         // (a rank's tokens, top_k) rows of all_to_all that come back
  kRowFlags,     // (a rank's tokens, top_k) uint32: the dispatch whose row has arrived
  kPairs,   // (2, world, values / 2) PairWithFlags: partial sums of a small all_reduce, from each
            // rank, double-buffered
  kParts,   // (world, a shard) fp32: partial sums of a large all_reduce, from each rank
  kTotals,  // (T, H) of out's dtype: the sums of a large all_reduce
};
inline constexpr int kPeerRegions = 8;

// A handle by which another process of the same host may open a process's memory.
struct PeerHandle {
  std::byte bytes[64] = {};
};

// Whether a device's kernels can reach another device's memory.
enum class PeerReach : uint8_t {
  kYes,
  kNoAccess,    // the link between the two does not support it
  kNotVisible,  // the other device is not visible to this process, so it is unknown
};

// Address of one region on each rank, as this rank's device reaches it.
struct PeerAddresses {
  std::byte* of_rank[kMostPeers] = {};
};

// Two values, each followed by a flag. 8 bytes are written and seen together, so a value has
// arrived once its flag equals the run's.
struct PairWithFlags {
  float first;
  uint32_t first_flag;
  float second;
  uint32_t second_flag;
};

struct PeerControl {
  uint64_t arrived[kMostPeers];  // by rank, which writes it: the last barrier that it has reached
  uint64_t
      taken[kMostPeers];  // by rank, which writes it: the last dispatch whose packets it has taken
  uint64_t round;         // the last barrier that this rank has passed
  // The last run of all_to_all that this rank has begun, and the last one whose packets it has
  // taken. There are two words so that each is read only by kernels that do not run while it is
  // written.
  uint64_t dispatch, dispatch_of_rows;
  uint64_t nonfinite;  // nonfinite values of the sum in progress
  uint32_t ctas;       // ctas of that sum that have ended
  uint32_t stop;  // 1: a rank is late, or the host has set this by a copy; no kernel waits any more
};

// Words that the device writes for the thread that watches it. The device never reads them, since
// host memory is far away. To end waits, the host writes PeerControl::stop.
struct PeerHostWords {
  uint32_t late;     // 1 + a rank that is late; 0: no rank
  uint32_t stopped;  // 1: a wait has ended by PeerControl::stop
};

// Words that a wait for another rank polls in addition to its flag.
struct PeerWait {
  PeerControl* control = nullptr;  // this rank's
  PeerHostWords* host = nullptr;   // as the device reaches it
  uint64_t timeout_ns = 0;         // longest wait for a rank
};

// Arguments of every kernel that writes to other ranks.
struct PeerLink {
  int32_t rank = 0, world = 1;
  PeerAddresses control;
  PeerWait wait;
};

}  // namespace nvfp4_moe::internal
