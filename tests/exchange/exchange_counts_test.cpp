// Exchange counts of a run of all_to_all.
#include "parallel/exchange_counts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "exchange/parallel_case.h"

namespace nvfp4_moe::internal {
namespace {

using ::testing::HasSubstr;

// No run can have these numbers: arrays would be read and written beyond their ends.
TEST(PacketCounts, NumbersThatCannotBeAreNamedWithTheirRank) {
  const struct {
    int64_t tokens_of_rank_1, tokens, rows;
    const char* text;
  } cases[] = {
      {2, 2, 4, ""},
      {2, 3, 4, "exchange counts of rank 1: expected at most 2 tokens for rank 0, of 2 rows each, got 3 and 4 rows"},
      {2, 2, 5, "got 2 and 5 rows"},
      {2, 0, 1, "got 0 and 1 rows"},
      {2, 2, INT64_MAX, "rows"},
  };
  for (const auto& one : cases)
    test::on_ranks(test::Over::kThreads, 2, test::kCaseTimeout, [&](Exchange& exchange) {
      PacketCounts sizes(2, INT64_MAX, false, 2);
      const bool first = exchange.rank() == 0;
      const std::array<int64_t, 4> counts = {first ? 1 : one.tokens, first ? 2 : one.rows, 0, 0};
      const Status status = sizes.gather(exchange, first ? 1 : one.tokens_of_rank_1, {}, false, counts);
      EXPECT_EQ(status.ok(), *one.text == 0);
      EXPECT_THAT(status.message(), HasSubstr(one.text));
    });
}

}  // namespace
}  // namespace nvfp4_moe::internal
