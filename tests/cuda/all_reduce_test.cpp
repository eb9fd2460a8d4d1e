// all_reduce on devices, over NCCL and over peer memory: the sum of the ranks' layers, run one by
// one.
#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "cuda/reduce_case.h"
#include "moe/tiny.h"

namespace nvfp4_moe::internal::test {
namespace {

class CudaAllReduce : public RanksTest {
 protected:
  Placement even(const CaseData& data) const {
    return *Placement::contiguous(data.spec.options.num_experts, world());
  }
};

TEST_P(CudaAllReduce, IsTheSumInTheOrderOfTheRanks) {
  const CaseData data = made(spec_of(9, 64, 32));
  for (const Placement& placement : {even(data), round_robin(6, world()), redundant(6, world())})
    check_reduce(data, placement, 3, between());
}

// Sums above 1 MiB are added in shards, which are unequal with three ranks.
TEST_P(CudaAllReduce, LargeSumsAreAddedInShards) {
  Case spec = spec_of(130, 2048, 16);
  spec.options.top_k = 1;
  const CaseData data = made(spec);
  check_reduce(data, even(data), 2, between());
}

TEST_P(CudaAllReduce, SmallSumsOfEveryKindOfLayer) {
  if (emulated() && (between() != Between::kPeers || world() != 2))
    GTEST_SKIP() << "an emulator runs two ranks of it, over peer memory";
  for (const auto& [name, spec] : kinds_of_layers()) {
    SCOPED_TRACE(name);
    const CaseData data = made(spec);
    check_reduce(data, even(data), 2, between());
    if (HasFailure()) return;
  }
  const CaseData many = made(dispatch_spec(65, Routing::kUniform, kNvfp4));
  check_reduce(many, even(many), 3, between());
}

TEST_P(CudaAllReduce, IsCapturedAndReplayed) {
  const CaseData data = made(spec_of(9, 64, 32));
  const std::vector<uint8_t> expected = expected_sum(data, even(data));
  on_devices(
      data, world(), combined_by(CombineBy::kAllReduce),
      [&](Rank& rank) {
        ASSERT_OK(rank.run(0, 9));  // a graph cannot load what a first call loads
        rank.out();
        ASSERT_OK(rank.exchange.barrier());
        const Replay replay(rank, 0, 9);
        ASSERT_OK(replay.status());
        ASSERT_OK(rank.exchange.barrier());
        for (int i = 0; i < 3; ++i)
          EXPECT_EQ(difference_of(data, expected, replay.run(data)), "") << "replay " << i;
        ASSERT_OK(rank.exchange.barrier());
      },
      between());
}

// The check sees neither the sum nor the slots of a rank.
TEST_P(CudaAllReduce, DeclinesTheCheck) {
  const CaseData data = made(spec_of(9, 64, 32));
  const ScopedEnv check("NVFP4_MOE_CHECK", "1");
  on_ranks(Over::kThreads, world(), kCaseTimeout, [&](Exchange& exchange) {
    ASSERT_OK(connect_devices(exchange, between()));
    EXPECT_THAT(open_on_device(exchange, data, combined_by(CombineBy::kAllReduce)),
                Refused(Code::kUnsupported, "NVFP4_MOE_CHECK"));
  });
}

INSTANTIATE_TEST_SUITE_P(Links, CudaAllReduce, testing::ValuesIn(links({1, 2, 3})), name_of_link);

}  // namespace
}  // namespace nvfp4_moe::internal::test
