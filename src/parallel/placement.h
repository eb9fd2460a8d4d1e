// Placement: which rank holds which experts.
//
// Each rank has slots, numbered across all ranks, and each slot holds one expert of the layer. An
// expert may have several slots (redundant experts), any of which gives the same bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"

namespace nvfp4_moe::internal {

class Placement {
 public:
  // Rank r holds experts [r E / world, (r + 1) E / world). kInvalidArgument if a rank would get no
  // expert.
  static Result<Placement> contiguous(int64_t num_experts, int world);
  // expert_of_slot: (world * slots of a rank), the same number for each rank. kInvalidArgument with
  // the slot or expert if one is out of range, an expert has no slot, or a rank has an expert
  // twice.
  static Result<Placement> of_map(int64_t num_experts, int world,
                                  std::vector<int64_t> expert_of_slot);

  int64_t num_experts() const { return static_cast<int64_t>(first_of_expert_.size()) - 1; }
  int world() const { return static_cast<int>(first_slot_.size()) - 1; }
  int64_t slots() const { return static_cast<int64_t>(expert_of_slot_.size()); }
  int64_t first_slot(int rank) const { return first_slot_[static_cast<size_t>(rank)]; }
  int64_t slots_of_rank(int rank) const { return first_slot(rank + 1) - first_slot(rank); }
  int64_t expert_of(int64_t slot) const { return expert_of_slot_[static_cast<size_t>(slot)]; }
  int rank_of(int64_t slot) const { return rank_of_slot_[static_cast<size_t>(slot)]; }
  int64_t replicas(int64_t expert) const {
    return first_of_expert_[static_cast<size_t>(expert) + 1] -
           first_of_expert_[static_cast<size_t>(expert)];
  }
  // One of the expert's slots, round-robin by turn (>= 0, from turn_of).
  int64_t slot_of(int64_t expert, int64_t turn) const {
    const int64_t first = first_of_expert_[static_cast<size_t>(expert)], count = replicas(expert);
    return slots_of_expert_[static_cast<size_t>(count == 1 ? first : first + turn % count)];
  }
  const std::vector<int64_t>& expert_of_slot() const { return expert_of_slot_; }
  std::string to_string() const;  // "0,1|2,3": the experts of each rank
  bool operator==(const Placement&) const = default;

 private:
  Placement() = default;
  static Placement make(int64_t num_experts, std::vector<int64_t> expert_of_slot,
                        std::vector<int64_t> first_slot);

  std::vector<int64_t> expert_of_slot_;   // (slots)
  std::vector<int64_t> first_slot_;       // (world + 1)
  std::vector<int> rank_of_slot_;         // (slots)
  std::vector<int64_t> first_of_expert_;  // (experts + 1) first index into slots_of_expert_
  std::vector<int64_t> slots_of_expert_;  // (slots) ascending for each expert
};

// Selects which of an expert's slots assignment k of a token uses. It advances with the token,
// since a popular expert tends to have the same k in every token, and with k, so that one token's
// redundant experts are not all on one rank. source_rank: 0 if all ranks have the same tokens.
// Devices compute the same (SlotsOfIds).
constexpr int64_t turn_of(int64_t source_rank, int64_t token, int64_t k) {
  return source_rank + token + k;
}

}  // namespace nvfp4_moe::internal
