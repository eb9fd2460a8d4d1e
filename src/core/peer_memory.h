// What the kernels of a rank know of the memory of all ranks' devices: addresses that they may write to, and where ranks
// tell each other how far they have come.
//
// All of it lies in device memory, zeros at first, but PeerHostWords: pinned memory of the rank's own host.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvfp4_moe {

// The most ranks whose devices write into each other's memory: those of one host. Their addresses are a kernel's argument.
inline constexpr int kMostPeers = 16;

// A region by what it is for. Each has its own memory: what protects one from being written too early is said where it is
// used (backend/device_peers.h), and holds only while nothing else lies there. Layers share it, of whatever sizes: so marks
// lie where nothing but marks does, and no layer's data is taken for one.
enum class PeerRegion : uint8_t {
  kControl,      // PeerControl
  kRecords,      // (world, a rank's tokens) records of all_to_all, from each home
  kRecordMarks,  // (world, a rank's tokens) uint32: the dispatch whose record has come
  kRows,         // (a rank's tokens, top_k) rows of all_to_all that come back
  kRowMarks,     // (a rank's tokens, top_k) uint32: the dispatch whose row has come
  kPairs,  // (2, world, values / 2) MarkedPair: partial sums of a small all_reduce, from each rank, of two runs by turns
  kParts,   // (world, a shard) fp32: partial sums of a large all_reduce, from each rank
  kTotals,  // (T, H) of out's dtype: the sums of a large all_reduce
};
inline constexpr int kPeerRegions = 8;

// Memory of one process as another one of the same host may open it.
struct PeerHandle {
  std::byte bytes[64] = {};
};

// Whether a device's kernels reach another one's memory.
enum class PeerReach : uint8_t {
  kYes,
  kNoAccess,    // what connects the two does not let them
  kNotVisible,  // the other is none of this process's devices, so that nobody can say
};

// A region of each rank, as this rank's device reaches it.
struct PeerAddresses {
  std::byte* of_rank[kMostPeers] = {};
};

// Two values with a mark behind each. What is written together is seen together in 8 bytes, so that a value whose mark is
// the run's has arrived, without any other word of its coming.
struct MarkedPair {
  float first;
  uint32_t first_mark;
  float second;
  uint32_t second_mark;
};

struct PeerControl {
  uint64_t arrived[kMostPeers];  // by rank: the last meeting that it has come to, written by it
  uint64_t taken[kMostPeers];    // by rank: the last dispatch whose records it has taken, written by it
  uint64_t round;                // the last meeting that this rank has been through
  // The last run of all_to_all that this rank has begun, and the last one whose records it has taken. One is read by the kernels that
  // the other one's writer has not begun yet, so that nobody reads what changes.
  uint64_t dispatch, dispatch_of_rows;
  uint64_t nonfinite;  // of a sum that is being made
  uint32_t ctas;       // of that sum that have ended
  uint32_t stop;       // 1: a rank did not come, or the host says so by a copy: nothing is waited for any more
};

// What the device tells the thread that watches it, and never reads: it is far from there. The host's word that waits are to
// end is PeerControl::stop.
struct PeerHostWords {
  uint32_t late;     // 1 + a rank that did not come in time; 0: none
  uint32_t stopped;  // 1: a wait has ended by PeerControl::stop
};

// What a wait for another rank looks at besides what it waits for.
struct PeerWait {
  PeerControl* control = nullptr;  // this rank's
  PeerHostWords* host = nullptr;   // as the device reaches it
  uint64_t timeout_ns = 0;         // that a rank is waited for
};

// What every kernel takes that writes to others.
struct PeerLink {
  int32_t rank = 0, world = 1;
  PeerAddresses control;
  PeerWait wait;
};

}  // namespace nvfp4_moe
