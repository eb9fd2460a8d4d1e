// DeviceReduce: a run of kAllReduce on a device: slots, this rank's experts in fp32, the sum over the ranks.
//
// The sum is the host's, bit for bit: each element in the order of the ranks. A small one is gathered whole by every rank
// and added there, in one exchange; a large one is added shard by shard, and the rounded shards are gathered.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/device_ranks.h"
#include "exchange/exchange.h"
#include "exchange/placement.h"
#include "moe/layer.h"

namespace nvfp4_moe {

class DeviceReduce {
 public:
  static Result<std::unique_ptr<DeviceReduce>> make(const MoeLayer& layer, const Exchange& exchange,
                                                    int64_t num_experts);

  size_t workspace_bytes(int64_t tokens) const;
  // What slots come from, now and once another placement has been taken. Waits for the device.
  Status set_placement(const Placement& placement);
  // Enqueues. batch and workspace have been checked, and all ranks have said that they can.
  Status run(Exchange& exchange, const Batch& batch, std::byte* workspace, void* stream);

  // (num_experts) assignments to each since the last reset. Waits for the device.
  Result<std::vector<uint64_t>> load() const;
  Status reset_load() const;

 private:
  struct Spans;
  DeviceReduce(const MoeLayer& layer, int world, int64_t num_experts);
  Spans spans(std::byte* workspace, int64_t tokens) const;
  Status sum(Exchange& exchange, const Batch& batch, const Spans& spans, void* stream);

  const MoeLayer& layer_;
  const DeviceRanks& ranks_;
  const DeviceMemory& memory_;
  const int world_;
  const int64_t num_experts_;
  Buffer load_;    // (num_experts) uint64 on the device
  Buffer tables_;  // (num_experts + 1 + slots) int32 on the device: first_of_expert, slots_of_expert
  std::vector<int64_t> send_bytes_, recv_bytes_;  // (world)
};

}  // namespace nvfp4_moe
