// The reference against an oracle written from the contract alone: every case of the table, every bit of the output.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "backend/host_layer.h"
#include "check/cases.h"
#include "support/host_run.h"
#include "support/spec_oracle.h"
#include "support/support.h"

namespace nvfp4_moe {
namespace {

void expect_same_status(const RunStatus& expected, const RunStatus& actual) {
  EXPECT_EQ(expected.bad_expert_ids, actual.bad_expert_ids);
  EXPECT_EQ(expected.nonfinite_tokens, actual.nonfinite_tokens);
  EXPECT_EQ(expected.nonfinite_rows, actual.nonfinite_rows);
  EXPECT_EQ(expected.hidden_blocks, actual.hidden_blocks);
  EXPECT_EQ(expected.hidden_saturated, actual.hidden_saturated);
  EXPECT_EQ(expected.hidden_zeroed, actual.hidden_zeroed);
  EXPECT_EQ(expected.intermediate_blocks, actual.intermediate_blocks);
  EXPECT_EQ(expected.intermediate_saturated, actual.intermediate_saturated);
  EXPECT_EQ(expected.intermediate_zeroed, actual.intermediate_zeroed);
}

class ReferenceAgainstContract : public ::testing::TestWithParam<const char*> {};

TEST_P(ReferenceAgainstContract, EveryBit) {
  int64_t cases = 0;
  for (const Case& spec : cases_named(std::string(GetParam()) + "/")) {
    if (spec.name.rfind(GetParam(), 0) != 0) continue;
    SCOPED_TRACE(spec.name);
    const auto data = make_case(spec);
    ASSERT_OK(data);
    test::HostRun run(kReferenceBackend, *data);
    ASSERT_TRUE(run.ok());
    const std::vector<float> actual = test::to_floats(run.run(*data), spec.out_dtype);
    const test::OracleResult oracle = test::oracle_layer(*data);
    expect_same_status(oracle.status, *run.buffers().status);
    int64_t different = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      const bool same = (std::isnan(actual[i]) && std::isnan(oracle.out[i])) || actual[i] == oracle.out[i];
      if (!same && different++ == 0)
        ADD_FAILURE() << "token " << i / static_cast<size_t>(spec.options.hidden_size) << " channel "
                      << i % static_cast<size_t>(spec.options.hidden_size) << ": expected " << oracle.out[i] << ", got "
                      << actual[i];
    }
    EXPECT_EQ(different, 0);
    ++cases;
  }
  EXPECT_GT(cases, 0);
}

INSTANTIATE_TEST_SUITE_P(Choices, ReferenceAgainstContract,
                         ::testing::Values("w4a4", "w4a16", "w4a4_static", "w4a4_compat", "w4a4_fixed_given",
                                           "w4a4_fixed_clamp", "w4a4_fixed_clamp_oai_before_down",
                                           "w4a4_fixed_checkpoint", "w4a4_clamped", "w4a4_step", "w4a4_oai",
                                           "w4a16_clamped", "w4a16_step", "w4a16_oai", "w4a4_before_down",
                                           "w4a16_before_down", "w4a4_rows_fp32", "w4a16_rows_fp32", "w4a4_shared",
                                           "w4a4_shared_before_down", "w4a16_shared", "w4a4_ep", "w4a16_ep_i64",
                                           "w4a4_i64_fp32", "w4a4_fp16", "w4a16_fp16_to_fp32", "w4a16_fp32_to_bf16",
                                           "w4a4_batch_invariant"),
                         [](const auto& info) { return std::string(info.param); });

TEST(CaseTable, EveryChoiceIsInstantiatedAbove) {
  for (const Case& spec : case_table()) {
    const std::string choice = spec.name.substr(0, spec.name.find('/'));
    EXPECT_NE(::testing::UnitTest::GetInstance(), nullptr);
    bool found = false;
    const auto& unit = *::testing::UnitTest::GetInstance();
    for (int s = 0; s < unit.total_test_suite_count(); ++s)
      for (int t = 0; t < unit.GetTestSuite(s)->total_test_count(); ++t)
        found = found || std::string(unit.GetTestSuite(s)->GetTestInfo(t)->name()) == "EveryBit/" + choice;
    EXPECT_TRUE(found) << choice;
  }
}

}  // namespace
}  // namespace nvfp4_moe
