// Placements by rule and by map.
#include "parallel/placement.h"

#include "exchange/exchange.h"

namespace nvfp4_moe::internal {
namespace {

// fits comfortably into an int32 id and per-rank counts
constexpr int64_t kMostSlots = 1 << 20;

Status check_sizes(int64_t num_experts, int world) {
  if (world < 1 || world > kMostRanks)
    return invalid_argument("placement: expected 1 to " + std::to_string(kMostRanks) +
                            " ranks, got " + std::to_string(world));
  if (num_experts < world || num_experts > kMostSlots)
    return invalid_argument("placement: expected an expert for each of " + std::to_string(world) +
                            " ranks and at most " + std::to_string(kMostSlots) + ", got " +
                            std::to_string(num_experts) + " experts");
  return {};
}

}  // namespace

Placement Placement::make(int64_t num_experts, std::vector<int64_t> expert_of_slot,
                          std::vector<int64_t> first_slot) {
  Placement placement;
  placement.expert_of_slot_ = std::move(expert_of_slot);
  placement.first_slot_ = std::move(first_slot);
  for (int rank = 0; rank < placement.world(); ++rank)
    placement.rank_of_slot_.insert(placement.rank_of_slot_.end(),
                                   static_cast<size_t>(placement.slots_of_rank(rank)), rank);
  std::vector<std::vector<int64_t>> slots(static_cast<size_t>(num_experts));
  for (int64_t slot = 0; slot < placement.slots(); ++slot)
    slots[static_cast<size_t>(placement.expert_of(slot))].push_back(slot);
  placement.first_of_expert_.push_back(0);
  for (const auto& of_expert : slots) {
    placement.slots_of_expert_.insert(placement.slots_of_expert_.end(), of_expert.begin(),
                                      of_expert.end());
    placement.first_of_expert_.push_back(static_cast<int64_t>(placement.slots_of_expert_.size()));
  }
  return placement;
}

Result<Placement> Placement::contiguous(int64_t num_experts, int world) {
  NVFP4_MOE_TRY(check_sizes(num_experts, world));
  std::vector<int64_t> experts, first{0};
  for (int64_t expert = 0; expert < num_experts; ++expert) experts.push_back(expert);
  for (int64_t rank = 1; rank <= world; ++rank) first.push_back(rank * num_experts / world);
  return make(num_experts, std::move(experts), std::move(first));
}

Result<Placement> Placement::of_map(int64_t num_experts, int world,
                                    std::vector<int64_t> expert_of_slot) {
  NVFP4_MOE_TRY(check_sizes(num_experts, world));
  const auto slots = static_cast<int64_t>(expert_of_slot.size());
  if (slots % world != 0 || slots < num_experts || slots > kMostSlots)
    return invalid_argument("placement: expected a multiple of " + std::to_string(world) +
                            " slots, at least " + std::to_string(num_experts) + " and at most " +
                            std::to_string(kMostSlots) + ", got " + std::to_string(slots));
  std::vector<int64_t> first, last_rank(static_cast<size_t>(num_experts), -1);
  for (int64_t rank = 0; rank <= world; ++rank) first.push_back(rank * (slots / world));
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t expert = expert_of_slot[static_cast<size_t>(slot)], rank = slot / (slots / world);
    if (expert < 0 || expert >= num_experts)
      return invalid_argument("placement: slot " + std::to_string(slot) +
                              ": expected an expert 0 to " + std::to_string(num_experts - 1) +
                              ", got " + std::to_string(expert));
    int64_t& seen = last_rank[static_cast<size_t>(expert)];
    if (seen == rank)
      return invalid_argument("placement: expected an expert once on a rank, got expert " +
                              std::to_string(expert) + " twice on rank " + std::to_string(rank));
    seen = rank;
  }
  for (int64_t expert = 0; expert < num_experts; ++expert)
    if (last_rank[static_cast<size_t>(expert)] < 0)
      return invalid_argument("placement: expected a slot for every expert, got none for expert " +
                              std::to_string(expert));
  return make(num_experts, std::move(expert_of_slot), std::move(first));
}

std::string Placement::to_string() const {
  std::string text;
  for (int64_t slot = 0; slot < slots(); ++slot) {
    if (slot > 0) text += rank_of(slot) == rank_of(slot - 1) ? ',' : '|';
    text += std::to_string(expert_of(slot));
  }
  return text;
}

}  // namespace nvfp4_moe::internal
