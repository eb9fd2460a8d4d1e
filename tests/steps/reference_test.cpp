// The reference against an oracle written only from the contract: every case of the table, every
// bit of the output.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "backend/layer_steps.h"
#include "cases/cases.h"
#include "support/case_run.h"
#include "support/spec_oracle.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

class ReferenceAgainstContract : public ::testing::TestWithParam<std::string> {};

TEST_P(ReferenceAgainstContract, EveryBit) {
  int64_t cases = 0;
  for (const Case& spec : cases_named(GetParam() + "/")) {
    if (spec.name.rfind(GetParam(), 0) != 0) continue;
    SCOPED_TRACE(spec.name);
    const auto data = make_case(spec);
    ASSERT_OK(data);
    test::CaseRun run(kReferenceBackend, *data);
    ASSERT_TRUE(run.ok());
    const std::vector<float> actual = test::to_floats(run.run(*data), spec.out_dtype);
    const test::OracleResult oracle = test::oracle_layer(*data);
    test::expect_same_status(oracle.status, *run.buffers().status);
    int64_t different = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      const bool same =
          (std::isnan(actual[i]) && std::isnan(oracle.out[i])) || actual[i] == oracle.out[i];
      if (!same && different++ == 0)
        ADD_FAILURE() << "token " << i / static_cast<size_t>(spec.options.hidden_size)
                      << " channel " << i % static_cast<size_t>(spec.options.hidden_size)
                      << ": expected " << oracle.out[i] << ", got " << actual[i];
    }
    EXPECT_EQ(different, 0);
    ++cases;
  }
  EXPECT_GT(cases, 0);
}

std::vector<std::string> choices() {
  std::vector<std::string> names;
  for (const Case& spec : case_table()) {
    std::string name = spec.name.substr(0, spec.name.find('/'));
    if (std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(std::move(name));
  }
  return names;
}
INSTANTIATE_TEST_SUITE_P(Choices, ReferenceAgainstContract, ::testing::ValuesIn(choices()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace nvfp4_moe::internal
