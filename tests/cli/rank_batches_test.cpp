// The batches of bench --ep, and the attribution of transfers to parts of a run.
#include "cli/bench/rank_batches.h"

#include <algorithm>
#include <map>
#include <set>

#include "cli/bench/timed_ranks.h"
#include "support/sizes.h"
#include "support/support.h"

namespace nvfp4_moe::internal::cli {
namespace {

MoeOptions sizes() { return test::sizes_of(32, 4, 16); }

constexpr int kWorld = 4;
constexpr int64_t kTokens = 256;

ColdBatches draw(RankRouting routing, size_t copies = 1, int64_t tokens = kTokens) {
  return rank_batches(sizes(), *Placement::contiguous(32, kWorld), routing, tokens, 7, copies);
}

TEST(RankBatches, AreLegalAndLoadTheRanksAsTheirRoutingSays) {
  const Placement placement = *Placement::contiguous(32, kWorld);
  std::map<RankRouting, double> busiest;
  for (const RankRouting routing : {RankRouting::kUniform, RankRouting::kZipf, RankRouting::kHot}) {
    const ColdBatches cold = draw(routing, 3);
    EXPECT_GE(cold.tokens.size(), kLeastBatches);
    EXPECT_EQ(cold.tokens.size() % 3, 0u);
    EXPECT_EQ(cold.experts.size(), cold.tokens.size());
    for (const RandomTokens& batch : cold.tokens) {
      ASSERT_EQ(batch.ids.size(), static_cast<size_t>(kTokens * 4));
      for (auto id = batch.ids.begin(); id != batch.ids.end(); id += 4) {
        const std::set<int32_t> of_token(id, id + 4);
        EXPECT_EQ(of_token.size(), 4u) << name_of(routing);
        EXPECT_TRUE(*of_token.begin() >= 0 && *of_token.rbegin() < 32);
      }
    }
    busiest[routing] = busiest_over_even(cold, 4, placement, CombineBy::kAllToAll);
  }
  EXPECT_LT(busiest[RankRouting::kUniform], 1.15);
  EXPECT_GT(busiest[RankRouting::kZipf], busiest[RankRouting::kUniform]);
  EXPECT_EQ(busiest[RankRouting::kHot], kWorld);
  const ColdBatches none = draw(RankRouting::kHot, 1, 0);
  EXPECT_EQ(busiest_over_even(none, 4, placement, CombineBy::kAllToAll), 1) << "no token";
}

// With weights 1 / r the most popular expert has about twice the second one's assignments, and a
// little less with distinct draws. More choices than experts repeat.
TEST(RankBatches, ZipfCrowdsSomeExperts) {
  const std::vector<uint64_t> load = load_of(draw(RankRouting::kZipf), 32);
  std::vector<uint64_t> sorted(load.rbegin(), load.rend());
  std::sort(sorted.rbegin(), sorted.rend());
  EXPECT_GT(sorted[0], 5 * sorted[20]);
  EXPECT_GT(sorted[0], sorted[1]);
  EXPECT_GT(sorted[31], 0u);
  MoeOptions options = sizes();
  options.num_experts = 3;
  const ColdBatches few =
      rank_batches(options, *Placement::contiguous(3, 3), RankRouting::kZipf, 5, 1, 1);
  for (const RandomTokens& batch : few.tokens)
    for (const int32_t id : batch.ids) EXPECT_TRUE(id >= 0 && id < 3) << id;
}

// Expert 0 has slots 0, 2 and 4 on ranks 0, 1 and 2; three ranks have two tokens each, all of
// expert 0 and one other.
TEST(RankBatches, SlotsOfAnExpertTakeTurns) {
  const Placement placement = *Placement::of_map(4, 3, {0, 1, 0, 2, 0, 3});
  ColdBatches cold;
  RandomTokens& batch = cold.tokens.emplace_back();
  batch.tokens = 6;
  batch.ids = {0, 1, 0, 1, 0, 2, 0, 2, 0, 3, 0, 3};
  // Under all_to_all each source rank begins with its own number.
  EXPECT_EQ(slots_of(batch, 2, placement, CombineBy::kAllToAll),
            (std::vector<int32_t>{0, 1, 2, 1, 2, 3, 4, 3, 4, 5, 0, 5}));
  EXPECT_EQ(slots_of(batch, 2, placement, CombineBy::kAllReduce),
            (std::vector<int32_t>{0, 1, 2, 1, 4, 3, 0, 3, 2, 5, 4, 5}));
  EXPECT_EQ(load_of(cold, 4), (std::vector<uint64_t>{6, 2, 2, 2}));
  EXPECT_EQ(busiest_over_even(cold, 2, placement, CombineBy::kAllReduce), 1);
  batch.ids = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  EXPECT_EQ(busiest_over_even(cold, 2, placement, CombineBy::kAllReduce), 3);
}

// A rank's work is many rows of one expert, or the weights of many experts with few rows; the
// larger one counts.
TEST(RankBatches, TheBusiestRankIsTheOneWithMostToDo) {
  const Placement placement = *Placement::contiguous(8, 2);
  const auto busiest = [&](int64_t rows_of_expert_0, int32_t experts_of_rank_1) {
    ColdBatches cold;
    RandomTokens& batch = cold.tokens.emplace_back();
    batch.ids.assign(static_cast<size_t>(rows_of_expert_0), 0);
    for (int32_t expert = 0; expert < experts_of_rank_1; ++expert) batch.ids.push_back(4 + expert);
    batch.tokens = static_cast<int64_t>(batch.ids.size());
    return busiest_ranks(cold, 1, placement, CombineBy::kAllReduce).front();
  };
  EXPECT_EQ(busiest(1, 2), 1);
  EXPECT_EQ(busiest(20, 2), 1) << "two experts' weights are read for two rows";
  EXPECT_EQ(busiest(500, 4), 0);
  EXPECT_EQ(busiest(3, 1), 0) << "alike: the lowest";
}

TEST(WireRecorder, TellsTheWayThereFromTheWayBack) {
  WireRecorder recorder;
  const auto part = [&](WirePart which) {
    return recorder.run().sent_bytes[static_cast<size_t>(which)];
  };
  for (int run = 0; run < 2; ++run) {
    recorder.begin_run();
    recorder.add({"all_gather", 1, 10});
    recorder.add({"all_to_all_v", 20, 100});
    recorder.add({"all_to_all_v", 300, 1000});
  }
  EXPECT_EQ(part(WirePart::kAgree), 2);
  EXPECT_EQ(part(WirePart::kDispatch), 40);
  EXPECT_EQ(part(WirePart::kCombine), 600);
  recorder.clear();
  recorder.begin_run();
  recorder.add({"all_reduce", 5, 1});
  recorder.add({"agree", 7, 1});
  EXPECT_EQ(part(WirePart::kCombine), 5);
  EXPECT_EQ(part(WirePart::kAgree), 7);
  // Over NCCL transfers have names of their own.
  recorder.clear();
  recorder.add({"dispatch", 1, 0, true});
  recorder.add({"rows back", 20, 0, true});
  recorder.add({"all_gather", 300, 0, true});
  EXPECT_EQ(part(WirePart::kDispatch), 1);
  EXPECT_EQ(part(WirePart::kCombine), 320);
}

}  // namespace
}  // namespace nvfp4_moe::internal::cli
