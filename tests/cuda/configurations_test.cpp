// Changing the configuration of a run's GEMMs in its plan affects every step, but no bit.
#include "cuda/configurations.h"

#include <vector>

#include "cases/cases.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using Configurations = BackendTest;

// Cases that no configuration may split along K, so that the order of every sum is fixed. They
// cover every size, format, routing and kind of data in the table.
TEST_P(Configurations, OfARunGiveTheSameBits) {
  int compared = 0;
  for (const Case& entry : case_table()) {
    Case spec = entry;
    spec.options.batch_invariant = true;
    const auto data = must(make_case(spec));
    if (declines(backend(), data->config) || spec.tokens == 0) continue;
    SCOPED_TRACE(spec.name);
    CaseRun chosen(backend(), *data);
    ASSERT_TRUE(chosen.ok());
    const std::vector<uint8_t> expected = chosen.run(*data);
    const RunStatus status = *chosen.buffers().status;
    for (int config = 0; config < configurations_of(backend(), spec.options.activation_format);
         ++config) {
      CaseRun forced(backend(), *data, -1, config);
      ASSERT_TRUE(forced.ok());
      const auto steps =
          backend().describe_run(data->config, spec.range, forced.plan(), spec.tokens);
      SCOPED_TRACE(steps[2].kernel);
      ASSERT_EQ(difference(expected, forced.run(*data), spec.out_dtype, spec.options.hidden_size),
                "");
      EXPECT_EQ(forced.broken_guard(), -1);
      const RunStatus& own = *forced.buffers().status;
      EXPECT_EQ(own.nonfinite_rows, status.nonfinite_rows);
      EXPECT_EQ(own.nonfinite_tokens, status.nonfinite_tokens);
      EXPECT_EQ(own.hidden_blocks, status.hidden_blocks);
      EXPECT_EQ(own.nonfinite_outputs, status.nonfinite_outputs);
      ++compared;
    }
  }
  EXPECT_GT(compared, 10 * configurations_of(backend(), ActivationFormat::kNvfp4));
}

INSTANTIATE_TEST_SUITE_P(Backends, Configurations, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
