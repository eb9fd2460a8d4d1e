// PeerReduce: the sum of all_reduce over devices that reach each other's memory, bit for bit the host's.
//
// A small one is one kernel, which sends every value to every rank and adds what comes. A large one is added shard by
// shard: 6 bytes a value over the link instead of 4 for each other rank, and two meetings.
#pragma once

#include "backend/device_peers.h"
#include "exchange/exchange.h"
#include "moe/layer.h"

namespace nvfp4_moe {

class PeerReduce {
 public:
  explicit PeerReduce(const MoeLayer& layer);
  // Collective: the memory that the ranks write to. max_values: of a run.
  Status connect(PeerMemory& peers, int64_t max_values);

  // What a rank sends to all others for a sum of so many values, of runs of at most max_values: marks are counted.
  static int64_t sent_bytes(int64_t count, int64_t max_values, int64_t world, DType out_dtype);

  // partial (count) fp32 of each rank -> out (count). nonfinite (1): of out, where true comes back; else nobody has counted.
  // failed (1): scratch.
  Result<bool> enqueue(const float* partial, int64_t count, void* out, DType out_dtype, uint64_t* nonfinite,
                       uint32_t* failed, void* stream) const;

 private:
  const DevicePeers& peers_;
  const int device_;
  PeerSum sum_;             // what all runs have alike
  int64_t most_small_ = 0;  // values of a small sum
};

}  // namespace nvfp4_moe
