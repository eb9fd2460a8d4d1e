// Graphs of ranks whose link has failed: every replay's out is NaN, even if stale bytes are in the
// receive buffers.
#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "cuda/dispatch_case.h"

namespace nvfp4_moe::internal::test {
namespace {

class CudaRanksFailures : public testing::TestWithParam<Between> {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_world(2, GetParam()); !why.empty()) GTEST_SKIP() << why;
  }
};

// Alternates the inputs, since a replay's leftovers are right for a later one with the same input.
void check_replays_after_a_failure(Between between, const ExpertParallelOptions& options, Case spec,
                                   int inputs) {
  std::vector<CaseData> cases;
  for (int input = 0; input < inputs; ++input) {
    spec.seed = static_cast<uint64_t>(input) + 1;
    cases.push_back(made(spec));
  }
  const bool holds_graphs = emulated() && between == Between::kNccl;
  if (holds_graphs)
    set_in_double("graphs", 1);  // a communicator stays until its graphs are gone, as NCCL's does
  on_devices(
      cases[0], 2, options,
      [&](Rank& rank) {
        ASSERT_OK(rank.run(0, spec.tokens));
        rank.out();
        ASSERT_OK(rank.exchange.barrier());
        {
          const Replay replay(rank, 0, spec.tokens);
          ASSERT_OK(replay.status());
          ASSERT_OK(rank.exchange.barrier());
          for (const CaseData& data : cases) {
            EXPECT_FALSE(all_nan(data, replay.run(data, 0x11)));
            EXPECT_OK(rank.status());
          }
          ASSERT_OK(rank.exchange.barrier());
          rank.exchange.device_link()->abort(Status(Code::kIo, "a cable was pulled"));
          for (int again = 0; again < 2; ++again)
            for (size_t input = 0; input < cases.size(); ++input)
              EXPECT_TRUE(all_nan(cases[input], replay.run(cases[input], 0x11)))
                  << "input " << input;
          EXPECT_EQ(rank.status().status().message(), "a cable was pulled");
          EXPECT_EQ(rank.run(0, spec.tokens).message(), "a cable was pulled");
          ASSERT_OK(rank.exchange.barrier());
        }
        if (holds_graphs) set_in_double("graphs", 0);
      },
      between);
}

TEST_P(CudaRanksFailures, EveryReplayOfASmallSumAfterAFailureIsNan) {
  const ExpertParallelOptions options = combined_by(CombineBy::kAllReduce);
  check_replays_after_a_failure(GetParam(), options, dispatch_spec(6, Routing::kUniform, kBf16), 7);
}

// The last step over NCCL is not a kernel of this library: NCCL writes the other ranks' shards
// directly into out.
TEST_P(CudaRanksFailures, EveryReplayOfALargeSumAfterAFailureIsNan) {
  Case large = dispatch_spec(130, Routing::kUniform, kBf16);
  large.options.hidden_size = 2048;
  large.options.intermediate_size = 16;
  large.options.top_k = 1;
  const ExpertParallelOptions options = combined_by(CombineBy::kAllReduce);
  check_replays_after_a_failure(GetParam(), options, large, emulated() ? 2 : 7);
}

TEST_P(CudaRanksFailures, EveryReplayOfAllToAllAfterAFailureIsNan) {
  ExpertParallelOptions options = with_capacity(6);
  for (const int64_t shared : {0, 16})
    check_replays_after_a_failure(GetParam(), options,
                                  dispatch_spec(6, Routing::kUniform, kNvfp4, shared), 7);
}

// More CTAs of combine than those that read the host's word themselves.
TEST_P(CudaRanksFailures, EveryReplayOfManyTokensAfterAFailureIsNan) {
  ExpertParallelOptions options = with_capacity(520);
  check_replays_after_a_failure(GetParam(), options, dispatch_spec(520, Routing::kUniform, kBf16),
                                emulated() ? 1 : 7);
}

std::string name_of_link(const testing::TestParamInfo<Between>& info) {
  return info.param == Between::kNccl ? "nccl" : "peers";
}
INSTANTIATE_TEST_SUITE_P(Links, CudaRanksFailures, testing::Values(Between::kNccl, Between::kPeers),
                         name_of_link);

}  // namespace
}  // namespace nvfp4_moe::internal::test
