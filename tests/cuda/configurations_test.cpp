// Changing the configuration of a run's GEMMs in its plan affects every step, but no bit.

#include <array>
#include <string>
#include <vector>

#include "backend/cuda/plain/config.h"
#include "backend/sm100/config.h"
#include "backend/sm120/config.h"
#include "backend/sm90/config.h"
#include "cases/cases.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// An architecture's number of configurations by the format of activations; 0 if it has no table of
// its own for that format.
struct Architecture {
  const Backend* backend;
  int configs, bf16_configs, fp8_configs = 0;
  int configs_of(const MoeConfig& config) const {
    const ActivationFormat format = config->activation_format;
    const int own = format == ActivationFormat::kFp8    ? fp8_configs
                    : format == ActivationFormat::kBf16 ? bf16_configs
                                                        : 0;
    return own != 0 ? own : configs;
  }
};

constexpr std::array kNames = {"cuda", "sm90", "sm100", "sm120"};

class Configurations : public testing::TestWithParam<int> {};

// Cases that no configuration may split along K, so that the order of every sum is fixed. They
// cover every size, format, routing and kind of data in the table.
TEST_P(Configurations, OfARunGiveTheSameBits) {
  constexpr int kPlain = static_cast<int>(cuda::plain::kConfigs.size());
  const Architecture all[] = {
      {&kCudaBackend, kPlain, 0},
      {&kSm90Backend, static_cast<int>(sm90::kBf16Configs), 0, static_cast<int>(sm90::kFp8Configs)},
      {&kSm100Backend, static_cast<int>(sm100::kGemmConfigs.size()),
       static_cast<int>(sm100::kBf16GemmConfigs.size())},
      {&kSm120Backend, static_cast<int>(sm120::kGemmConfigs.size()), kPlain}};
  const Architecture& of = all[GetParam()];
  const std::string reason = why_not_here(*of.backend);
  if (!reason.empty()) GTEST_SKIP() << of.backend->name << ": " << reason;
  int compared = 0;
  for (const Case& entry : case_table()) {
    Case spec = entry;
    spec.options.batch_invariant = true;
    const auto data = must(make_case(spec));
    if (declines(*of.backend, data->config) || spec.tokens == 0) continue;
    SCOPED_TRACE(spec.name);
    CaseRun chosen(*of.backend, *data);
    ASSERT_TRUE(chosen.ok());
    const std::vector<uint8_t> expected = chosen.run(*data);
    const RunStatus status = *chosen.buffers().status;
    for (int config = 0; config < of.configs_of(data->config); ++config) {
      CaseRun forced(*of.backend, *data, -1, config);
      ASSERT_TRUE(forced.ok());
      const auto steps =
          of.backend->describe_run(data->config, spec.range, forced.plan(), spec.tokens);
      ASSERT_EQ(difference(expected, forced.run(*data), spec.out_dtype, spec.options.hidden_size),
                "")
          << steps[2].kernel;
      EXPECT_EQ(forced.broken_guard(), -1) << steps[2].kernel;
      const RunStatus& own = *forced.buffers().status;
      EXPECT_EQ(own.nonfinite_rows, status.nonfinite_rows) << steps[2].kernel;
      EXPECT_EQ(own.nonfinite_tokens, status.nonfinite_tokens) << steps[2].kernel;
      EXPECT_EQ(own.hidden_blocks, status.hidden_blocks) << steps[2].kernel;
      EXPECT_EQ(own.nonfinite_outputs, status.nonfinite_outputs) << steps[2].kernel;
      ++compared;
    }
  }
  EXPECT_GT(compared, 10 * of.configs);
}

INSTANTIATE_TEST_SUITE_P(Backends, Configurations, testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return kNames[static_cast<size_t>(info.param)]; });

}  // namespace
}  // namespace nvfp4_moe::internal::test
