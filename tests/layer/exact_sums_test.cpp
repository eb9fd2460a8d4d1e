// The output of every backend has the reference's bits if all sums are exact
// (support/exact_case.h), from one row an expert to 150.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "support/backends.h"
#include "support/case_run.h"
#include "support/exact_case.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

class ExactSums : public test::BackendTest {};

TEST_P(ExactSums, LayersHaveTheReferencesBits) {
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kBf16})
    for (const int64_t tokens : {int64_t{1}, int64_t{9}, int64_t{40}, int64_t{300}}) {
      SCOPED_TRACE(testing::Message() << to_string(format) << ", " << tokens << " tokens");
      const CaseData data = test::exact_case({}, format, tokens);
      test::CaseRun reference(kReferenceBackend, data), own(backend(), data);
      ASSERT_TRUE(reference.ok() && own.ok());
      const std::vector<uint8_t> expected = reference.run(data), actual = own.run(data);
      ASSERT_EQ(test::difference(expected, actual, DType::kF32, data.spec.options.hidden_size), "");
      EXPECT_EQ(own.broken_guard(), -1);
      // All elements differ, so that swapped elements are detected.
      const std::vector<float> values = test::to_floats(expected, DType::kF32);
      EXPECT_GT(std::set<float>(values.begin(), values.end()).size(),
                std::min<size_t>(values.size() / 4, 2000));
    }
}

INSTANTIATE_TEST_SUITE_P(Backends, ExactSums, ::testing::ValuesIn(test::judged_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
