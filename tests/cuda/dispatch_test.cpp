// all_to_all on devices: the bits and counts of one rank with all experts.

#include <array>
#include <string>
#include <vector>

#include "cuda/dispatch_case.h"

namespace nvfp4_moe::internal::test {
namespace {

using CudaDispatch = DispatchTest;

TEST_P(CudaDispatch, GivesTheBitsAndCountsOfOneRank) {
  check_nine_tokens(GetParam(),
                    {{kNvfp4, Routing::kBadIds, 0, 16, Tokens::kEven},
                     {kBf16, Routing::kZipf, 0, 0, Tokens::kEven},
                     {kFp8, Routing::kUniform, 0, 0, Tokens::kAllOnLast},
                     {kNvfp4, Routing::kOneExpert, 9, 0, Tokens::kAllOnLast},
                     {kBf16, Routing::kPartlyNone, 9, 16, Tokens::kEven},
                     {kFp8, Routing::kUniform, 9, 0, Tokens::kEven}},
                    Between::kNccl);
}

TEST_P(CudaDispatch, OneToManyTokensOfEveryRouting) {
  size_t turn = 0;
  for (const int64_t tokens : {1, 2, 33, 1100, 8192}) {
    for (const Routing routing :
         {Routing::kUniform, Routing::kZipf, Routing::kOneExpert, Routing::kEmptyExperts,
          Routing::kPartlyNone, Routing::kAllNone, Routing::kBadIds}) {
      constexpr std::array kFormats = {kNvfp4, kBf16, kFp8};
      const ActivationFormat format = kFormats[turn++ % kFormats.size()];
      // An emulator runs one large batch in the time of many small ones.
      if (!runs_here(format) || (emulated() && tokens > (routing == Routing::kZipf ? 1100 : 33)))
        continue;
      SCOPED_TRACE(std::string(to_string(routing)) + " of " + std::to_string(tokens) + ", " +
                   to_string(format));
      ExpertParallelOptions options = with_capacity(turn % 2 == 0 ? tokens : 0);
      check_bits(made(dispatch_spec(tokens, routing, format, turn % 5 == 0 ? 16 : 0)), GetParam(),
                 options, Tokens::kEven);
      if (HasFailure()) return;
    }
  }
}

TEST_P(CudaDispatch, ChoicesOfALayer) {
  for (const auto& [name, spec] : choices_of_a_layer()) {
    SCOPED_TRACE(name);
    for (const int64_t capacity : {0, 6}) {
      ExpertParallelOptions options = with_capacity(capacity);
      check_bits(made(spec), GetParam(), options, Tokens::kEven);
    }
    if (HasFailure()) return;
  }
}

TEST_P(CudaDispatch, AnyPlacementNowAndOnceRearranged) {
  const int world = GetParam();
  const CaseData data = made(dispatch_spec(8, Routing::kUniform, kNvfp4));
  ExpertParallelOptions options{.placement = redundant(8, world)};
  check_bits(data, world, options, Tokens::kEven);
  const OneRank one(data);
  std::vector<uint64_t> load(8);
  for (int64_t at = 0; at < 16; ++at)
    load[static_cast<size_t>(data.id(at / 2, at % 2))] += static_cast<uint64_t>(world);
  on_devices(data, world, {}, [&](Rank& rank) {
    ASSERT_OK(ranks_of(rank.layer).rearrange(round_robin(8, world), source_of(data)));
    ASSERT_OK(rank.run(0, 8));  // every rank passes all tokens
    EXPECT_EQ(difference_of(data, one.out, rank.out()), "");
    const auto counted = must(ranks_of(rank.layer).expert_load());
    EXPECT_EQ(*counted, load);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaDispatch, testing::Values(1, 2, 4),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace nvfp4_moe::internal::test
