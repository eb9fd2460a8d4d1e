#include "parallel/slots.h"

#include "moe/registry.h"

namespace nvfp4_moe::internal {

Status HostSlots::translate(const Batch& batch, int64_t source_rank, int32_t* slots, void*) {
  const auto* const ids = batch.topk_ids;
  for (int64_t token = 0, at = 0; token < batch.tokens; ++token)
    for (int64_t k = 0; k < top_k_; ++k, ++at) {
      const int64_t id = batch.ids_dtype == DType::kI64 ? static_cast<const int64_t*>(ids)[at]
                                                        : static_cast<const int32_t*>(ids)[at];
      if (id < 0 || id >= placement_.num_experts()) {
        slots[at] = id == -1 ? -1 : -2;
        continue;
      }
      slots[at] = static_cast<int32_t>(placement_.slot_of(id, turn_of(source_rank, token, k)));
      load_[static_cast<size_t>(id)].fetch_add(1, std::memory_order_relaxed);
    }
  return {};
}

Result<std::vector<uint64_t>> HostSlots::expert_load() const {
  std::vector<uint64_t> counts;
  for (const auto& count : load_) counts.push_back(count.load(std::memory_order_relaxed));
  return counts;
}

Status HostSlots::reset_expert_load() {
  for (auto& count : load_) count.store(0, std::memory_order_relaxed);
  return {};
}

DeviceSlots::DeviceSlots(const MoeLayer& layer, int64_t num_experts)
    : ranks_(*device_ranks(layer.plan().device.kind)),
      memory_(*layer.backend().memory),
      device_(layer.weights().device),
      num_experts_(num_experts),
      top_k_(layer.config()->top_k) {}

Result<std::unique_ptr<DeviceSlots>> DeviceSlots::make(const MoeLayer& layer,
                                                       const Placement& placement) {
  std::unique_ptr<DeviceSlots> slots(new DeviceSlots(layer, placement.num_experts()));
  const size_t load_bytes = static_cast<size_t>(placement.num_experts()) * sizeof(uint64_t);
  NVFP4_MOE_ASSIGN(slots->load_,
                   slots->memory_.allocate(load_bytes, slots->device_, "load of the experts"));
  NVFP4_MOE_TRY(slots->reset_expert_load());
  NVFP4_MOE_TRY(slots->set_placement(placement));
  return slots;
}

Status DeviceSlots::set_placement(const Placement& placement) {
  std::vector<int32_t> tables(static_cast<size_t>(num_experts_ + 1));
  for (int64_t expert = 0; expert < num_experts_; ++expert) {
    for (int64_t turn = 0; turn < placement.replicas(expert); ++turn)
      tables.push_back(static_cast<int32_t>(placement.slot_of(expert, turn)));
    tables[static_cast<size_t>(expert) + 1] =
        tables[static_cast<size_t>(expert)] + static_cast<int32_t>(placement.replicas(expert));
  }
  first_of_rank_ = static_cast<int64_t>(tables.size());
  for (int rank = 0; rank <= placement.world(); ++rank)
    tables.push_back(static_cast<int32_t>(placement.first_slot(rank)));
  const size_t bytes = tables.size() * sizeof(int32_t);
  NVFP4_MOE_TRY(memory_.synchronize(device_));  // a run may still read the old ones
  // Graphs hold this address. The size never changes, since ranks keep their number of slots.
  if (tables_.size_bytes() != bytes) {
    NVFP4_MOE_ASSIGN(tables_, memory_.allocate(bytes, device_, "slots of the experts"));
  }
  return memory_.to_device(device_, tables_.data(), tables.data(), bytes, nullptr);
}

SlotsOfIds DeviceSlots::call(const Batch& batch, int64_t source_rank, int32_t* slots) const {
  SlotsOfIds call;
  call.ids = batch.topk_ids;
  call.ids_dtype = batch.ids_dtype;
  call.tokens = batch.tokens;
  call.top_k = top_k_;
  call.num_experts = num_experts_;
  call.source = source_rank;
  call.first_of_expert = tables();
  call.slots_of_expert = tables() + num_experts_ + 1;
  call.slots = slots;
  call.load = reinterpret_cast<uint64_t*>(load_.data());
  return call;
}

Result<std::vector<uint64_t>> DeviceSlots::expert_load() const {
  std::vector<uint64_t> counts(static_cast<size_t>(num_experts_));
  NVFP4_MOE_TRY(memory_.synchronize(device_));
  NVFP4_MOE_TRY(memory_.to_host(device_, counts.data(), load_.data(),
                                counts.size() * sizeof(uint64_t), nullptr));
  return counts;
}

Status DeviceSlots::reset_expert_load() {
  const std::vector<uint64_t> zeros(static_cast<size_t>(num_experts_));
  NVFP4_MOE_TRY(memory_.synchronize(device_));
  return memory_.to_device(device_, load_.data(), zeros.data(), zeros.size() * sizeof(uint64_t),
                           nullptr);
}

}  // namespace nvfp4_moe::internal
