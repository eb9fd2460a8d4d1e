// Placements: which slot holds which expert, and maps that are refused.
#include "parallel/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "exchange/parallel_case.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

using ::testing::HasSubstr;

// That both directions of a placement tell the same story, and every expert has a slot.
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

TEST(Placements, ByRule) {
  EXPECT_EQ(Placement::contiguous(8, 4)->to_string(), "0,1|2,3|4,5|6,7");
  EXPECT_EQ(Placement::contiguous(5, 2)->to_string(), "0,1|2,3,4");
  for (int world = 1; world <= 9; ++world)
    for (int64_t experts = world; experts < 20; ++experts) {
      expect_whole(*Placement::contiguous(experts, world));
      expect_whole(test::round_robin(experts, world));
    }
  EXPECT_THAT(Placement::contiguous(3, 4).status().message(), HasSubstr("an expert for each of 4 ranks"));
  EXPECT_THAT(Placement::contiguous(3, 0).status().message(), HasSubstr("got 0"));
}

TEST(Placements, ByMap) {
  const auto placement = Placement::of_map(3, 2, {0, 2, 1, 2});
  ASSERT_OK(placement);
  expect_whole(*placement);
  EXPECT_EQ(placement->to_string(), "0,2|1,2");
  EXPECT_EQ(placement->replicas(2), 2);
  EXPECT_EQ(placement->slot_of(2, 0), 1);
  EXPECT_EQ(placement->slot_of(2, 1), 3);
  const auto refused = [](std::vector<int64_t> map) {
    return Placement::of_map(3, 2, std::move(map)).status().message();
  };
  EXPECT_THAT(refused({0, 1, 2}), HasSubstr("a multiple of 2 slots, at least 3"));
  EXPECT_THAT(refused({0, 1}), HasSubstr("got 2"));
  EXPECT_THAT(refused({0, 1, 0, 1}), HasSubstr("got none for expert 2"));
  EXPECT_THAT(refused({0, 1, 2, 3}), HasSubstr("slot 3: expected an expert 0 to 2, got 3"));
  EXPECT_THAT(refused({0, -1, 2, 1}), HasSubstr("slot 1: expected an expert 0 to 2, got -1"));
  EXPECT_THAT(refused({0, 1, 2, 2}), HasSubstr("got expert 2 twice on rank 1"));
}

}  // namespace
}  // namespace nvfp4_moe::internal
