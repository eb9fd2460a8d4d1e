// all_to_all on devices, over NCCL and over peer memory: the bits and counts of one rank with all
// experts.

#include <array>
#include <string>
#include <vector>

#include "cuda/dispatch_case.h"

namespace nvfp4_moe::internal::test {
namespace {

using CudaAllToAll = RanksTest;

// Few tokens, but every format: on an emulator every run takes time.
TEST_P(CudaAllToAll, GivesTheBitsAndCountsOfOneRank) {
  // Over peer memory a capacity changes nothing: all tokens of one expert fit.
  const int64_t capacity = between() == Between::kPeers ? 2 : 9;
  const struct {
    ActivationFormat format;
    Routing routing;
    int64_t capacity, shared;
    Tokens tokens;
  } cases[] = {{kNvfp4, Routing::kBadIds, 0, 16, Tokens::kEven},
               {kBf16, Routing::kZipf, 0, 0, Tokens::kEven},
               {kFp8, Routing::kUniform, 0, 0, Tokens::kAllOnLast},
               {kNvfp4, Routing::kOneExpert, capacity, 0, Tokens::kAllOnLast},
               {kBf16, Routing::kPartlyNone, capacity, 16, Tokens::kEven},
               {kFp8, Routing::kUniform, capacity, 0, Tokens::kEven},
               {kNvfp4, Routing::kAllNone, 0, 0, Tokens::kEven}};
  for (const auto& one : cases) {
    if (!runs_here(one.format)) continue;
    SCOPED_TRACE(testing::Message() << to_string(one.format) << " " << to_string(one.routing)
                                    << ", capacity " << one.capacity);
    check_bits(made(dispatch_spec(9, one.routing, one.format, one.shared)), world(),
               with_capacity(one.capacity), one.tokens, between());
    if (HasFailure()) return;
  }
}

TEST_P(CudaAllToAll, OneToManyTokensOfEveryRouting) {
  const bool peers = between() == Between::kPeers;
  size_t turn = 0;
  // Both sides of 64: of a rank's own tokens, and of all ranks' tokens.
  for (const int64_t tokens : {1, 2, 33, 64, 130, 1100, 8192})
    for (const Routing routing :
         {Routing::kUniform, Routing::kZipf, Routing::kOneExpert, Routing::kEmptyExperts,
          Routing::kPartlyNone, Routing::kAllNone, Routing::kBadIds}) {
      constexpr std::array kFormats = {kNvfp4, kBf16, kFp8};
      const ActivationFormat format = kFormats[turn++ % kFormats.size()];
      // An emulator runs one large batch in the time of many small ones.
      const int64_t most_emulated = peers ? (routing == Routing::kZipf ? 260 / world() : 1)
                                          : (routing == Routing::kZipf ? 1100 : 33);
      if (!runs_here(format) || (emulated() && tokens > most_emulated)) continue;
      SCOPED_TRACE(testing::Message()
                   << to_string(routing) << " of " << tokens << ", " << to_string(format));
      check_bits(made(dispatch_spec(tokens, routing, format, turn % 5 == 0 ? 16 : 0)), world(),
                 with_capacity(turn % 2 == 0 && !peers ? tokens : 0), Tokens::kEven, between());
      if (HasFailure()) return;
    }
}

TEST_P(CudaAllToAll, EveryKindOfLayer) {
  const bool peers = between() == Between::kPeers;
  if (emulated() && peers && world() != 2) GTEST_SKIP() << "an emulator runs two ranks of it";
  for (const auto& [name, spec] : kinds_of_layers())
    for (const int64_t capacity : {0, 6}) {
      if (peers && capacity > 0) continue;
      SCOPED_TRACE(name);
      check_bits(made(spec), world(), with_capacity(capacity), Tokens::kEven, between());
      if (HasFailure()) return;
    }
}

TEST_P(CudaAllToAll, AnyPlacementNowAndOnceRearranged) {
  const CaseData data = made(dispatch_spec(8, Routing::kUniform, kNvfp4));
  ExpertParallelOptions options{.placement = redundant(8, world())};
  check_bits(data, world(), options, Tokens::kEven, between());
  const OneRank one(data);
  std::vector<uint64_t> load(8);
  for (int64_t at = 0; at < 16; ++at)
    load[static_cast<size_t>(data.id(at / 2, at % 2))] += static_cast<uint64_t>(world());
  on_devices(
      data, world(), {},
      [&](Rank& rank) {
        ASSERT_OK(ranks_of(rank.layer).rearrange(round_robin(8, world()), source_of(data)));
        ASSERT_OK(rank.run(0, 8));  // every rank passes all tokens
        EXPECT_EQ(difference_of(data, one.out, rank.out()), "");
        const auto counted = must(ranks_of(rank.layer).expert_load());
        EXPECT_EQ(*counted, load);
        ASSERT_OK(rank.exchange.barrier());
      },
      between());
}

INSTANTIATE_TEST_SUITE_P(Links, CudaAllToAll, testing::ValuesIn(links({1, 2, 4})), name_of_link);

}  // namespace
}  // namespace nvfp4_moe::internal::test
