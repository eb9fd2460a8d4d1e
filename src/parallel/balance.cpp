// Greedy replication and packing, after the balancer that DeepSeek published with V3, followed by a
// search that swaps pairs of slots. Greedy replication minimizes the heaviest slot, not the
// heaviest rank. So smaller numbers of replicas are tried too, and experts dealt out round-robin.
#include "parallel/balance.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace nvfp4_moe::internal {
namespace {

// Swaps terminate on their own, since each makes the heaviest rank lighter.
constexpr int kMostExchanges = 10000;
// The number of candidate counts of redundant slots for hot experts.
constexpr int64_t kMostTries = 8;

// A slot to place: one replica of an expert, with its share of the expert's load.
struct Replica {
  int64_t expert;
  double load;
};

struct RankSlots {
  std::vector<Replica> replicas;
  double load = 0;

  bool has(int64_t expert) const {
    return std::any_of(replicas.begin(), replicas.end(),
                       [expert](const Replica& r) { return r.expert == expert; });
  }
  void add(const Replica& replica) {
    replicas.push_back(replica);
    load += replica.load;
  }
  Replica take(size_t index) {
    const Replica replica = replicas[index];
    replicas.erase(replicas.begin() + static_cast<int64_t>(index));
    load -= replica.load;
    return replica;
  }
};

// The number of slots of each expert. The first `hot` redundant slots go, one by one, to the expert
// with the most load per slot. The rest go to the experts with the least load.
std::vector<int64_t> count_replicas(std::span<const uint64_t> load, int world, int64_t slots,
                                    int64_t hot) {
  std::vector<int64_t> counts(load.size(), 1);
  for (auto left = slots - static_cast<int64_t>(load.size()); left > 0; --left, --hot) {
    size_t best = load.size();
    double best_load = 0;
    for (size_t expert = 0; expert < load.size(); ++expert) {
      if (counts[expert] == world) continue;  // more than one on a rank does not help
      const double each = static_cast<double>(load[expert]) / static_cast<double>(counts[expert]);
      if (best < load.size() && (hot > 0 ? each <= best_load : each >= best_load)) continue;
      best = expert;
      best_load = each;
    }
    ++counts[best];
  }
  return counts;
}

// The rank with the least load that has room and does not hold `expert` (if 0 or more), or world.
size_t lightest(const std::vector<RankSlots>& ranks, size_t slots, int64_t expert) {
  size_t best = ranks.size();
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].replicas.size() == slots || (expert >= 0 && ranks[r].has(expert))) continue;
    if (best == ranks.size() || ranks[r].load < ranks[best].load) best = r;
  }
  return best;
}

void place(std::vector<RankSlots>& ranks, size_t slots, const Replica& replica) {
  if (const size_t rank = lightest(ranks, slots, replica.expert); rank < ranks.size())
    return ranks[rank].add(replica);
  // Only ranks that already hold the expert have room. Take a full rank without it, and move one of
  // its experts that the roomy rank lacks. It exists, since the full rank has more experts.
  const size_t roomy = lightest(ranks, slots, -1);
  for (RankSlots& full : ranks) {
    if (full.has(replica.expert)) continue;
    for (size_t i = 0; i < full.replicas.size(); ++i) {
      if (ranks[roomy].has(full.replicas[i].expert)) continue;
      ranks[roomy].add(full.take(i));
      return full.add(replica);
    }
  }
}

// Swaps the pair of replicas, one of them on the heaviest rank, that minimizes the heavier of the
// two ranks. False if no swap helps.
bool exchange_one(std::vector<RankSlots>& ranks) {
  const auto heaviest =
      std::max_element(ranks.begin(), ranks.end(),
                       [](const RankSlots& a, const RankSlots& b) { return a.load < b.load; });
  RankSlots* other = nullptr;
  size_t mine = 0, theirs = 0;
  double best = heaviest->load * (1 - 1e-9);  // by more than rounding
  for (RankSlots& rank : ranks) {
    if (&rank == &*heaviest) continue;
    for (size_t i = 0; i < heaviest->replicas.size(); ++i) {
      if (rank.has(heaviest->replicas[i].expert)) continue;
      for (size_t j = 0; j < rank.replicas.size(); ++j) {
        const double moved = heaviest->replicas[i].load - rank.replicas[j].load;
        const double heavier = std::max(heaviest->load - moved, rank.load + moved);
        if (heavier >= best || heaviest->has(rank.replicas[j].expert)) continue;
        best = heavier;
        other = &rank;
        mine = i;
        theirs = j;
      }
    }
  }
  if (other == nullptr) return false;
  const Replica from = heaviest->take(mine), to = other->take(theirs);
  heaviest->add(to);
  other->add(from);
  return true;
}

Replica replica_of(std::span<const uint64_t> load, int64_t expert, int64_t count) {
  return {expert,
          static_cast<double>(load[static_cast<size_t>(expert)]) / static_cast<double>(count)};
}

std::vector<RankSlots> greedy_ranks(std::span<const uint64_t> load, int world, size_t slots,
                                    int64_t hot) {
  const std::vector<int64_t> counts =
      count_replicas(load, world, static_cast<int64_t>(slots) * world, hot);
  std::vector<Replica> replicas;
  for (size_t expert = 0; expert < load.size(); ++expert)
    replicas.insert(replicas.end(), static_cast<size_t>(counts[expert]),
                    replica_of(load, static_cast<int64_t>(expert), counts[expert]));
  std::stable_sort(replicas.begin(), replicas.end(),
                   [](const Replica& a, const Replica& b) { return a.load > b.load; });
  std::vector<RankSlots> ranks(static_cast<size_t>(world));
  for (const Replica& replica : replicas) place(ranks, slots, replica);
  return ranks;
}

// Deals out the experts round-robin, heaviest first. No rank gets an expert twice.
std::vector<RankSlots> dealt_ranks(std::span<const uint64_t> load, int world, size_t slots) {
  std::vector<int64_t> order(load.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return load[static_cast<size_t>(a)] > load[static_cast<size_t>(b)];
  });
  const size_t all = slots * static_cast<size_t>(world);
  std::vector<RankSlots> ranks(static_cast<size_t>(world));
  for (size_t at = 0; at < all; ++at) {
    const size_t place_in_order = at % order.size();
    const auto count =
        static_cast<int64_t>(all / order.size() + (place_in_order < all % order.size() ? 1 : 0));
    ranks[at / slots].add(replica_of(load, order[place_in_order], count));
  }
  return ranks;
}

// Applies all swaps that help, then sorts each rank's experts.
Placement improved(std::vector<RankSlots> ranks, int64_t experts) {
  for (int i = 0; i < kMostExchanges && exchange_one(ranks); ++i) continue;
  std::vector<int64_t> map;
  for (RankSlots& rank : ranks) {
    std::sort(rank.replicas.begin(), rank.replicas.end(),
              [](const Replica& a, const Replica& b) { return a.expert < b.expert; });
    for (const Replica& replica : rank.replicas) map.push_back(replica.expert);
  }
  return *Placement::of_map(experts, static_cast<int>(ranks.size()), std::move(map));
}

}  // namespace

double imbalance(std::span<const uint64_t> load, const Placement& placement) {
  std::vector<double> ranks(static_cast<size_t>(placement.world()));
  for (int64_t slot = 0; slot < placement.slots(); ++slot) {
    const int64_t expert = placement.expert_of(slot);
    ranks[static_cast<size_t>(placement.rank_of(slot))] +=
        static_cast<double>(load[static_cast<size_t>(expert)]) /
        static_cast<double>(placement.replicas(expert));
  }
  const double total = std::accumulate(ranks.begin(), ranks.end(), 0.0);
  if (total == 0) return 1;
  return *std::max_element(ranks.begin(), ranks.end()) * placement.world() / total;
}

Result<Placement> propose_placement(std::span<const uint64_t> load, int world,
                                    int64_t slots_per_rank) {
  const auto experts = static_cast<int64_t>(load.size());
  NVFP4_MOE_TRY(Placement::contiguous(experts, world).status());
  if (slots_per_rank > experts || slots_per_rank < (experts + world - 1) / world)
    return invalid_argument(
        "slots of a rank: expected " + std::to_string((experts + world - 1) / world) + " to " +
        std::to_string(experts) + " for " + std::to_string(experts) + " experts on " +
        std::to_string(world) + " ranks, got " + std::to_string(slots_per_rank));
  const auto slots = static_cast<size_t>(slots_per_rank);
  const int64_t spare = slots_per_rank * world - experts, tries = std::min(spare, kMostTries);
  Placement best = improved(dealt_ranks(load, world, slots), experts);
  for (int64_t i = 0; i <= tries; ++i) {
    const int64_t hot = tries == 0 ? 0 : spare - spare * i / tries;
    const Placement other = improved(greedy_ranks(load, world, slots, hot), experts);
    if (imbalance(load, other) < imbalance(load, best)) best = other;
  }
  return best;
}

}  // namespace nvfp4_moe::internal
