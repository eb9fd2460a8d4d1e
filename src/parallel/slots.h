// Slots: translates ids to slots by a placement and counts how often each expert was chosen, on
// hosts and on devices.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/device_exchange.h"
#include "moe/layer.h"
#include "parallel/placement.h"

namespace nvfp4_moe::internal {

class Slots {
 public:
  virtual ~Slots() = default;
  // Slots (T, k) of the batch's ids, which are counted: -1 no expert, -2 an invalid id.
  // source_rank: as for turn_of.
  virtual Status translate(const Batch& batch, int64_t source_rank, int32_t* slots,
                           void* stream) = 0;
  // Switches to another placement with the same number of slots on each rank. On a device it reuses
  // the same memory, so that captured runs see the new placement. All calls below wait for it.
  virtual Status set_placement(const Placement& placement) = 0;
  // (num_experts) assignments to each expert since the last reset.
  virtual Result<std::vector<uint64_t>> expert_load() const = 0;
  virtual Status reset_expert_load() = 0;
};

class HostSlots : public Slots {
 public:
  HostSlots(const Placement& placement, int64_t top_k)
      : placement_(placement), top_k_(top_k), load_(static_cast<size_t>(placement.num_experts())) {}
  Status translate(const Batch& batch, int64_t source_rank, int32_t* slots, void* stream) override;
  Status set_placement(const Placement& placement) override {
    placement_ = placement;
    return {};
  }
  Result<std::vector<uint64_t>> expert_load() const override;
  Status reset_expert_load() override;

 private:
  Placement placement_;
  const int64_t top_k_;
  std::vector<std::atomic<uint64_t>> load_;  // (num_experts)
};

class DeviceSlots : public Slots {
 public:
  static Result<std::unique_ptr<DeviceSlots>> make(const MoeLayer& layer,
                                                   const Placement& placement);
  Status translate(const Batch& batch, int64_t source_rank, int32_t* slots, void* stream) override {
    return ranks_.slots_of_ids(device_, call(batch, source_rank, slots), stream);
  }
  Status set_placement(const Placement& placement) override;
  Result<std::vector<uint64_t>> expert_load() const override;
  Status reset_expert_load() override;

  // The arguments of translate's kernel, for a kernel that does more.
  SlotsOfIds call(const Batch& batch, int64_t source_rank, int32_t* slots) const;
  // (world + 1) on the device: the first slot of each rank.
  const int32_t* first_of_rank() const { return tables() + first_of_rank_; }

 private:
  DeviceSlots(const MoeLayer& layer, int64_t num_experts);
  const int32_t* tables() const { return reinterpret_cast<const int32_t*>(tables_.data()); }

  const DeviceRanks& ranks_;
  const DeviceMemory& memory_;
  const int device_;
  const int64_t num_experts_, top_k_;
  Buffer load_;  // (num_experts) uint64 on the device
  // on the device, int32: (num_experts + 1) first_of_expert, (slots) slots_of_expert, (world + 1)
  // first_of_rank
  Buffer tables_;
  int64_t first_of_rank_ = 0;
};

}  // namespace nvfp4_moe::internal
