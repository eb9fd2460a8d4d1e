// DeviceReduce: a run of kAllReduce on a device: slots, this rank's experts in fp32, the sum over the ranks.
//
// The sum is the host's, bit for bit: each element in the order of the ranks. Over a library's calls a small one is gathered
// whole by every rank and added there, in one exchange; a large one is added shard by shard, and the rounded shards are
// gathered. Over memory that the ranks reach it is PeerReduce's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device_exchange.h"
#include "exchange/exchange.h"
#include "moe/layer.h"
#include "parallel/device_slots.h"
#include "parallel/peer_reduce.h"

namespace nvfp4_moe {

class DeviceReduce {
 public:
  DeviceReduce(const MoeLayer& layer, const DeviceSlots& slots, int world);
  // Collective: sums go over memory that the ranks reach from now on.
  Status connect(PeerMemory& peers, int64_t max_tokens);

  size_t workspace_bytes(int64_t tokens) const;
  // Enqueues. batch and workspace have been checked, and all ranks have said that they can.
  Status run(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream);

 private:
  struct Spans;
  Spans spans(std::byte* workspace, int64_t tokens) const;
  Status sum(Exchange& exchange, const Batch& batch, const Spans& spans, void* stream);

  const MoeLayer& layer_;
  const DeviceSlots& slots_;
  const DeviceRanks& ranks_;
  const DeviceMemory& memory_;
  const int world_;
  std::unique_ptr<PeerReduce> peers_;             // null: over a library's calls
  std::vector<int64_t> send_bytes_, recv_bytes_;  // (world)
};

}  // namespace nvfp4_moe
