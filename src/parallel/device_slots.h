// DeviceSlots: ids to slots on a device, for both ways to combine: a placement's tables there, and the load of the experts.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device_exchange.h"
#include "moe/layer.h"
#include "parallel/placement.h"

namespace nvfp4_moe {

class DeviceSlots {
 public:
  static Result<std::unique_ptr<DeviceSlots>> make(const MoeLayer& layer, int64_t num_experts);

  // What slots come from, now and once another placement has been taken: of as many slots in the same memory, so that
  // captured runs go by it too. Waits for the device.
  Status set_placement(const Placement& placement);
  // Enqueues: slots (T, k) of the batch's ids, and counts them. home: of turn_of.
  Status enqueue(const Batch& batch, int64_t home, int32_t* slots, void* stream) const;
  // What enqueue calls, for a kernel that does more than that.
  SlotsOfIds call(const Batch& batch, int64_t home, int32_t* slots) const;
  // (world + 1) on the device: the first slot of each rank.
  const int32_t* first_of_rank() const { return tables() + first_of_rank_; }

  // (num_experts) assignments to each since the last reset. Waits for the device.
  Result<std::vector<uint64_t>> load() const;
  Status reset_load() const;

 private:
  DeviceSlots(const MoeLayer& layer, int64_t num_experts);
  const int32_t* tables() const { return reinterpret_cast<const int32_t*>(tables_.data()); }

  const MoeLayer& layer_;
  const DeviceRanks& ranks_;
  const DeviceMemory& memory_;
  const int64_t num_experts_;
  Buffer load_;    // (num_experts) uint64 on the device
  Buffer tables_;  // (num_experts + 1) first_of_expert, (slots) slots_of_expert, (world + 1) first_of_rank: int32 there
  int64_t first_of_rank_ = 0;
};

}  // namespace nvfp4_moe
