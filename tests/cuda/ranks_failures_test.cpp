// Graphs of ranks whose link has failed: every replay's out is NaN, even if stale bytes are in the
// receive buffers.
#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "cuda/reduce_case.h"

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
  check_replays_after_a_failure(GetParam(), combined_by(CombineBy::kAllReduce),
                                dispatch_spec(6, Routing::kUniform, kBf16), 7);
}

// The last step over NCCL is not a kernel of this library: NCCL writes the other ranks' shards
// directly into out.
TEST_P(CudaRanksFailures, EveryReplayOfALargeSumAfterAFailureIsNan) {
  Case large = dispatch_spec(130, Routing::kUniform, kBf16);
  large.options.hidden_size = 2048;
  large.options.intermediate_size = 16;
  large.options.top_k = 1;
  check_replays_after_a_failure(GetParam(), combined_by(CombineBy::kAllReduce), large,
                                emulated() ? 2 : 7);
}

TEST_P(CudaRanksFailures, EveryReplayOfAllToAllAfterAFailureIsNan) {
  for (const int64_t shared : {0, 16})
    check_replays_after_a_failure(GetParam(), with_capacity(6),
                                  dispatch_spec(6, Routing::kUniform, kNvfp4, shared), 7);
}

// More CTAs of combine than those that read the host's word themselves.
TEST_P(CudaRanksFailures, EveryReplayOfManyTokensAfterAFailureIsNan) {
  check_replays_after_a_failure(GetParam(), with_capacity(520),
                                dispatch_spec(520, Routing::kUniform, kBf16), emulated() ? 1 : 7);
}

// A rank that cannot run reports that before anything is enqueued, and the next run succeeds. A
// rank that leaves ends the current run on the others. An error of the link ends all later ones.
TEST_P(CudaRanksFailures, WhatDoesNotGoIsNamedOnEveryRank) {
  const bool nccl = GetParam() == Between::kNccl;
  const CaseData data = made(dispatch_spec(4, Routing::kUniform, kBf16));
  const std::vector<uint8_t> one = OneRank(data).out,
                             sum = expected_sum(data, *Placement::contiguous(8, 2));
  for (const auto& [combine, capacity] : {std::pair(CombineBy::kAllToAll, 0),
                                          {CombineBy::kAllToAll, 4},
                                          {CombineBy::kAllReduce, 0}}) {
    if (!nccl && capacity > 0) continue;
    SCOPED_TRACE(testing::Message() << to_string(combine) << ", capacity " << capacity);
    ExpertParallelOptions options = with_capacity(capacity);
    options.combine = combine;
    const bool reduces = combine == CombineBy::kAllReduce, captures = reduces || capacity > 0;
    on_devices(
        data, 2, options,
        [&](Rank& rank) {
          const bool mine = rank.exchange.rank() == 1;
          const auto run = [&] { return rank.run(0, 4).message(); };
          Batch wrong = rank.batch.spec;
          if (mine) wrong.hidden = nullptr;
          EXPECT_EQ(rank.layer.run(wrong, rank.workspace.data(), rank.workspace_bytes, rank.stream)
                        .message(),
                    "rank 1: hidden: expected a pointer, got null");
          if (nccl && !captures) {
            EXPECT_THAT(Replay(rank, 0, 4).status().message(),
                        HasSubstr("rank 0: stream: expected one that is not captured"));
          } else if (nccl) {
            ASSERT_OK(rank.exchange.barrier());
            EXPECT_EQ(
                mine ? run() : Replay(rank, 0, 4).status().message(),
                "stream of rank 1: expected one that is captured, as on rank 0, got one that is "
                "not");
          }
          ASSERT_OK(rank.exchange.barrier());
          EXPECT_EQ(run(), "");
          EXPECT_EQ(difference_of(data, reduces ? sum : one, rank.out()), "");
          ASSERT_OK(rank.exchange.barrier());
          if (mine) {
            rank.exchange.device_link()->abort(Status(Code::kIo, "a cable was pulled"));
            rank.exchange.abort(Status(Code::kIo, "killed"));
            EXPECT_EQ(run(), "a cable was pulled");
          } else {
            EXPECT_THAT(run(), HasSubstr("rank 1: killed"));
          }
        },
        GetParam());
  }
}

TEST_P(CudaRanksFailures, LinksThatDoNotFitAreRefusedByNameOnEveryRank) {
  const CaseData data = made(dispatch_spec(4, Routing::kUniform, kBf16));
  on_ranks(Over::kThreads, 2, kCaseTimeout, [&](Exchange& exchange) {
    const auto expect = [](const Status& status, const char* words) {
      EXPECT_THAT(status.message(), HasSubstr(words));
    };
    const char* const without = "rank 0: device: expected cpu for a layer over an exchange without";
    for (const CombineBy combine : {CombineBy::kAllToAll, CombineBy::kAllReduce})
      expect(open_on_device(exchange, data, combined_by(combine)).status(), without);
    expect(use_peers(exchange, "cpu"), "rank 0: peers: expected a device cuda:N, got cpu");
    expect(use_nccl(exchange, "cpu"), "rank 0: nccl: expected a device cuda:N, got cpu");
    expect(use_nccl(exchange, "cuda:9", kFakeNccl), "rank 0: device cuda:9");
    ASSERT_OK(connect_devices(exchange, GetParam()));
    if (GetParam() == Between::kPeers) {
      expect(use_peers(exchange, "cuda:0"),
             "rank 0: peers: expected an exchange without devices, got one with peers");
      expect(use_nccl(exchange, "cuda:0"),
             "rank 0: nccl: expected an exchange without devices, got one with peers");
    }
    EXPECT_OK(exchange.barrier());
  });
}

INSTANTIATE_TEST_SUITE_P(Links, CudaRanksFailures, testing::Values(Between::kNccl, Between::kPeers),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace nvfp4_moe::internal::test
