// Proposed placements are legal, the same for the same load, and balanced; also measured on runs.
#include "parallel/balance.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "core/random.h"
#include "exchange/parallel_case.h"

namespace nvfp4_moe::internal::test {
namespace {

// Only experts of the last rank are chosen, evenly or by Zipf's law: that rank does all the work.
TEST(Balance, AHotRankComesWithinAFifthOfEven) {
  for (const int world : {2, 4, 8, 16})
    for (const int64_t experts : {64, 256, 384})
      for (const bool zipf : {false, true}) {
        const int64_t chosen = experts / world;
        if (chosen < world && !zipf) continue;  // fewer chosen experts than ranks
        SCOPED_TRACE(std::to_string(experts) + " experts on " + std::to_string(world) +
                     (zipf ? ", zipf" : ", even"));
        std::vector<uint64_t> load(static_cast<size_t>(experts));
        for (int64_t i = 0; i < chosen; ++i)
          load[static_cast<size_t>(experts - chosen + i)] =
              zipf ? static_cast<uint64_t>(720720 / (i + 1)) : 1000;
        // Zipf's first expert exceeds a rank's part by itself, so it takes slots beyond one an
        // expert. So do chosen experts that cannot be divided evenly among ranks: 24 on 16.
        const int64_t more = zipf ? std::max<int64_t>(2, world / 4) : chosen % world == 0 ? 0 : 1;
        EXPECT_EQ(imbalance(load, *Placement::contiguous(experts, world)), world);
        const auto proposed = must(propose_placement(load, world, chosen + more));
        EXPECT_EQ(proposed->slots(), (chosen + more) * world);
        EXPECT_LE(imbalance(load, *proposed), 1.2);
        EXPECT_EQ(*propose_placement(load, world, chosen + more), *proposed);
      }
}

// Compares with the best of many random placements, which no search method finds.
TEST(Balance, AnyLoadGetsALegalPlacementAboutAsEvenAsTheBestOfMany) {
  Random random(3);
  double worst = 0;
  for (int round = 0; round < 200; ++round) {
    const int world = static_cast<int>(1 + random.below(8));
    const int64_t experts = world + random.below(24);
    const int64_t least = (experts + world - 1) / world;
    // up to every expert on every rank
    const int64_t slots = least + random.below(experts - least + 1);
    std::vector<uint64_t> load(static_cast<size_t>(experts));
    for (uint64_t& count : load)
      count = static_cast<uint64_t>(random.below(5) == 0 ? random.below(100000) : random.below(50));
    const auto proposed = propose_placement(load, world, slots);
    ASSERT_OK(proposed);  // of_map has seen every expert somewhere and none twice on a rank
    double best = world;
    for (int other = 0; other < 100; ++other) {
      std::vector<int64_t> order(static_cast<size_t>(experts)), map;
      std::iota(order.begin(), order.end(), 0);
      for (int64_t i = experts - 1; i > 0; --i)
        std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(random.below(i + 1))]);
      for (int64_t slot = 0; slot < slots * world; ++slot)
        map.push_back(order[static_cast<size_t>(slot % experts)]);
      const auto placement = must(Placement::of_map(experts, world, map));
      best = std::min(best, imbalance(load, *placement));
    }
    worst = std::max(worst, imbalance(load, *proposed) / best);
    if (slots == experts) {
      EXPECT_LE(imbalance(load, *proposed), 1 + 1e-9) << "every expert is on every rank";
    }
  }
  EXPECT_LE(worst,
            1.1);  // a heuristic: for these loads the worst is 1.06 times the best that was found
}

// The rows that each rank multiplies in a run, derived from its count of their blocks.
TEST(Balance, AHotRankIsEvenAfterRearranging) {
  constexpr int kWorld = 4;
  Case spec = sized_case(16, 2, 64, 48, 4096);
  auto data = must(make_case(spec));
  for (int64_t token = 0; token < spec.tokens; ++token)
    for (int64_t k = 0; k < 2; ++k)
      data->set_id(token, k, (data->id(token, k) % 4) % (k + 3));  // 0 most, 3 least
  std::vector<int64_t> map;  // contiguous, and one more slot a rank for an expert of the next rank
  for (int64_t rank = 0; rank < kWorld; ++rank)
    for (int64_t e = 0; e < 5; ++e) map.push_back((rank * 4 + e + (e == 4)) % 16);
  ExpertParallelOptions options{.placement = *Placement::of_map(16, kWorld, map)};
  std::vector<uint64_t> before(kWorld), after(kWorld);
  std::vector<uint8_t> first_out(data->out_bytes()), second_out(data->out_bytes());
  on_ranks(Over::kThreads, kWorld, kCaseTimeout, [&](Exchange& exchange) {
    const LayerSource source = source_of(*data);
    const auto layer = must(open_layer(data->config, source, options_of(*data),
                                       internal::Parallel{borrowed(exchange), options}));
    PoisonedWorkspace workspace((*layer)->workspace_bytes());
    const auto tokens = tokens_of(Tokens::kEven, spec.tokens, exchange.rank(), kWorld);
    const auto run = [&](std::vector<uint8_t>& out) {
      const Batch mine = slice_of(*data, tokens.first, tokens.second, out.data());
      EXPECT_OK((*layer)->run(mine, workspace.data(), workspace.size_bytes()));
      return (*layer)->status(workspace.data(), workspace.size_bytes())->intermediate_blocks;
    };
    before[static_cast<size_t>(exchange.rank())] = run(first_out);
    const auto load = must(ranks_of(**layer).expert_load());
    const auto proposed = must(propose_placement(*load, kWorld, 5));
    ASSERT_OK(ranks_of(**layer).rearrange(*proposed, source));
    after[static_cast<size_t>(exchange.rank())] = run(second_out);
    EXPECT_OK(exchange.barrier());
  });
  EXPECT_EQ(first_out, second_out);
  const auto most_over_even = [](const std::vector<uint64_t>& rows) {
    const auto total = static_cast<double>(std::reduce(rows.begin(), rows.end()));
    return static_cast<double>(*std::max_element(rows.begin(), rows.end())) * kWorld / total;
  };
  EXPECT_GT(most_over_even(before), 2.5);
  EXPECT_LE(most_over_even(after), 1.2);
}

// Checks that both directions of a placement agree, and that every expert has a slot.
void expect_whole(const Placement& placement) {
  std::set<int64_t> found;
  for (int64_t expert = 0; expert < placement.num_experts(); ++expert) {
    ASSERT_GT(placement.replicas(expert), 0);
    for (int64_t turn = 0; turn < 2 * placement.replicas(expert); ++turn) {
      const int64_t slot = placement.slot_of(expert, turn);
      EXPECT_EQ(placement.expert_of(slot), expert);
      EXPECT_EQ(slot, placement.slot_of(expert, turn + placement.replicas(expert)));
      found.insert(slot);
    }
  }
  EXPECT_EQ(static_cast<int64_t>(found.size()), placement.slots());
  EXPECT_EQ(placement.first_slot(0), 0);
  EXPECT_EQ(placement.first_slot(placement.world()), placement.slots());
  for (int64_t slot = 0; slot < placement.slots(); ++slot) {
    EXPECT_GE(slot, placement.first_slot(placement.rank_of(slot)));
    EXPECT_LT(slot, placement.first_slot(placement.rank_of(slot) + 1));
  }
}

TEST(Placements, ByRuleAndByMap) {
  EXPECT_EQ(Placement::contiguous(8, 4)->to_string(), "0,1|2,3|4,5|6,7");
  EXPECT_EQ(Placement::contiguous(5, 2)->to_string(), "0,1|2,3,4");
  for (int world = 1; world <= 9; ++world)
    for (int64_t experts = world; experts < 20; ++experts) {
      expect_whole(*Placement::contiguous(experts, world));
      expect_whole(round_robin(experts, world));
    }
  const auto placement = must(Placement::of_map(3, 2, {0, 2, 1, 2}));
  expect_whole(*placement);
  EXPECT_EQ(placement->to_string(), "0,2|1,2");
  EXPECT_EQ(placement->slot_of(2, 0), 1);
  EXPECT_EQ(placement->slot_of(2, 1), 3);
}

TEST(Placements, ImpossibleOnesAreRefused) {
  const auto of_map = [](std::vector<int64_t> map) { return Placement::of_map(3, 2, map); };
  const auto proposed = [](int world, int64_t slots) {
    return propose_placement(std::vector<uint64_t>(8, 1), world, slots);
  };
  const std::pair<Result<Placement>, const char*> cases[] = {
      {Placement::contiguous(3, 4), "an expert for each of 4 ranks"},
      {Placement::contiguous(3, 0), "got 0"},
      {of_map({0, 1, 2}), "a multiple of 2 slots, at least 3"},
      {of_map({0, 1}), "got 2"},
      {of_map({0, 1, 0, 1}), "got none for expert 2"},
      {of_map({0, 1, 2, 3}), "slot 3: expected an expert 0 to 2, got 3"},
      {of_map({0, -1, 2, 1}), "slot 1: expected an expert 0 to 2, got -1"},
      {of_map({0, 1, 2, 2}), "got expert 2 twice on rank 1"},
      {proposed(4, 1), "expected 2 to 8"},
      {proposed(4, 9), "expected 2 to 8"},
      {proposed(9, 2), "an expert for each of 9 ranks"}};
  for (const auto& [result, text] : cases) EXPECT_THAT(result.status().message(), HasSubstr(text));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
