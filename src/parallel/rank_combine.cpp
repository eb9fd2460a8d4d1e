// Code that all implementations of RankCombine share: failures, expert load, and new placements of
// an open layer.
#include "parallel/rank_combine.h"

#include <algorithm>

#include "io/json.h"
#include "parallel/open.h"

namespace nvfp4_moe::internal {

const char* to_string(CombineBy value) { return name_of(value); }

Status multiply(const LayerSteps& steps, const StepContext& step, const PartBuffers& part) {
  NVFP4_MOE_TRY(steps.gemm1_swiglu(step, part));
  NVFP4_MOE_TRY(steps.requantize(step, part));
  return steps.gemm2(step, part);
}

Result<RankCombine*> ranks_of(const MoeLayer& layer, const char* what) {
  if (layer.combine() != nullptr) return &ranks_of(layer);
  return unsupported(
      std::string(what) +
      ": expected a layer over an exchange, got one of one rank; open it with an exchange");
}

DeviceLink* RankCombine::link() const {
  return layer_.backend().memory == nullptr ? nullptr : exchange().device_link();
}

void RankCombine::fail(const Status& why) {
  exchange().abort(why);
  if (link() != nullptr) link()->abort(why);
}

void RankCombine::describe(Json& json) const {
  json["num_experts"] = config()->num_experts;
  json["shared_intermediate_size"] = config()->shared_intermediate_size;
  json["max_tokens"] = max_tokens();
  json["workspace_bytes"] = workspace_bytes(max_tokens());
  const Status polls = exchange().can_poll();
  json["expert_parallel"] = {
      {"rank", rank()},
      {"world", world()},
      {"over", link() == nullptr ? "host" : link()->describe()},
      {"ends", polls.ok() ? "polled" : "reported by calls: " + polls.message()},
      {"combine", to_string(options().combine)},
      {"capacity", options().capacity},
      {"placement", placement().to_string()}};
}

Result<std::vector<uint64_t>> RankCombine::expert_load(const Status& mine) {
  Result<std::vector<uint64_t>> counts = mine.ok() ? local_expert_load() : mine;
  if (options().combine == CombineBy::kAllReduce) return counts;
  NVFP4_MOE_TRY(exchange().agree(counts.status()));
  std::vector<uint64_t> all(counts->size() * static_cast<size_t>(world()));
  NVFP4_MOE_TRY(exchange().all_gather(
      counts->data(), static_cast<int64_t>(counts->size() * sizeof(uint64_t)), all.data()));
  for (size_t expert = 0; expert < counts->size(); ++expert) {
    (*counts)[expert] = 0;
    for (size_t at = expert; at < all.size(); at += counts->size()) (*counts)[expert] += all[at];
  }
  return counts;
}

Status RankCombine::rearrange(const Placement& placement, const LayerSource& source) {
  const Call call(*this);
  NVFP4_MOE_TRY(call.status());
  const Placement& before = ranks_.placement;
  const auto check = [&]() -> Status {
    if (placement.num_experts() != config()->num_experts || placement.world() != world())
      return invalid_argument("placement: expected one of " +
                              std::to_string(config()->num_experts) + " experts on " +
                              std::to_string(world()) + " ranks");
    for (int rank = 0; rank < placement.world(); ++rank)
      if (placement.slots_of_rank(rank) != before.slots_of_rank(rank))
        return invalid_argument("placement: expected " +
                                std::to_string(before.slots_of_rank(rank)) + " slots on rank " +
                                std::to_string(rank) + ", got " +
                                std::to_string(placement.slots_of_rank(rank)));
    if (!ranks_.weights.empty() && !source.weights.empty() && source.weights != ranks_.weights)
      return invalid_argument("weights: expected those that the layer was opened with, of hash " +
                              ranks_.weights + ", got those of " + source.name + ", of hash " +
                              source.weights);
    return {};
  };
  NVFP4_MOE_TRY(exchange().agree(check()));
  NVFP4_MOE_TRY(exchange().check_same("rearrange", {{"placement", placement.to_string()}}));
  const auto replace = [&]() -> Status {
    const ExpertRange& range = layer_.weights().range;
    for (int64_t local = 0; local < range.count; ++local) {
      const int64_t slot = range.global(local), expert = placement.expert_of(slot);
      if (expert == before.expert_of(slot)) continue;
      const auto loaded = source.expert(expert);
      const Status replaced =
          loaded.ok() ? layer_.replace_expert_at_rest(local, loaded->source) : loaded.status();
      if (!replaced.ok())
        return replaced.in("slot " + std::to_string(slot) + ", expert " + std::to_string(expert));
    }
    return slots().set_placement(placement);
  };
  Status replaced;
  try {
    replaced = replace();
  } catch (...) {  // report even an out-of-memory error to the others
    replaced = caught_exception();
  }
  const Status all =
      exchange().agree(replaced, std::max(options().load_timeout, exchange().timeout()));
  if (!all.ok()) {
    exchange().abort_agreed(all);
    return all;
  }
  ranks_.placement = placement;
  return {};
}

Status RankCombine::rearrange_checkpoint(std::vector<int64_t> expert_of_slot,
                                         const Checkpoint& checkpoint, int64_t layer) {
  Result<Placement> placement =
      Placement::of_map(config()->num_experts, world(), std::move(expert_of_slot));
  Result<LayerSource> source =
      placement.ok() ? validated_source(checkpoint, layer, false) : placement.status();
  NVFP4_MOE_TRY(exchange().agree(source.status()));
  return rearrange(*placement, *source);
}

}  // namespace nvfp4_moe::internal
