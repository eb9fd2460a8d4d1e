#include "parallel/device_slots.h"

#include "moe/registry.h"

namespace nvfp4_moe {

DeviceSlots::DeviceSlots(const MoeLayer& layer, int64_t num_experts)
    : layer_(layer),
      ranks_(*device_ranks(layer.plan().device.kind)),
      memory_(*layer.backend().memory),
      num_experts_(num_experts) {}

Result<std::unique_ptr<DeviceSlots>> DeviceSlots::make(const MoeLayer& layer, int64_t num_experts) {
  std::unique_ptr<DeviceSlots> slots(new DeviceSlots(layer, num_experts));
  const size_t load_bytes = static_cast<size_t>(num_experts) * sizeof(uint64_t);
  const int device = layer.weights().device;
  NVFP4_MOE_ASSIGN(slots->load_, slots->memory_.allocate(load_bytes, device, "load of the experts"));
  NVFP4_MOE_TRY(slots->reset_load());
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
  const int device = layer_.weights().device;
  NVFP4_MOE_TRY(memory_.synchronize(device));  // a run may still read the old ones
  // Graphs hold their address, and ranks keep as many slots.
  if (tables_.size_bytes() != bytes) {
    NVFP4_MOE_ASSIGN(tables_, memory_.allocate(bytes, device, "slots of the experts"));
  }
  return memory_.to_device(device, tables_.data(), tables.data(), bytes, nullptr);
}

SlotsOfIds DeviceSlots::call(const Batch& batch, int64_t home, int32_t* slots) const {
  SlotsOfIds call;
  call.ids = batch.topk_ids;
  call.ids_dtype = batch.ids_dtype;
  call.tokens = batch.tokens;
  call.top_k = layer_.config()->top_k;
  call.num_experts = num_experts_;
  call.home = home;
  call.first_of_expert = tables();
  call.slots_of_expert = tables() + num_experts_ + 1;
  call.slots = slots;
  call.load = reinterpret_cast<uint64_t*>(load_.data());
  return call;
}

Status DeviceSlots::enqueue(const Batch& batch, int64_t home, int32_t* slots, void* stream) const {
  return ranks_.slots_of_ids(layer_.weights().device, call(batch, home, slots), stream);
}

Result<std::vector<uint64_t>> DeviceSlots::load() const {
  std::vector<uint64_t> counts(static_cast<size_t>(num_experts_));
  const int device = layer_.weights().device;
  NVFP4_MOE_TRY(memory_.synchronize(device));
  NVFP4_MOE_TRY(memory_.to_host(device, counts.data(), load_.data(), counts.size() * sizeof(uint64_t), nullptr));
  return counts;
}

Status DeviceSlots::reset_load() const {
  const std::vector<uint64_t> zeros(static_cast<size_t>(num_experts_));
  const int device = layer_.weights().device;
  NVFP4_MOE_TRY(memory_.synchronize(device));
  return memory_.to_device(device, load_.data(), zeros.data(), zeros.size() * sizeof(uint64_t), nullptr);
}

}  // namespace nvfp4_moe
