// fp8: the error against unrounded activations and weights is far below NVFP4's; and the report of
// its packing.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "layer/format_error.h"
#include "support/backends.h"
#include "support/spec_oracle.h"

namespace nvfp4_moe::internal {
namespace {

class Fp8Layer : public test::BackendTest {
 protected:
  bool declined() const {
    return test::declines(backend(), *MoeConfig::make(cases_named("fp8/").front().options));
  }
};

// E4M3 rounds every element by 2.6 % rms, independent of its neighbours. NVFP4 rounds a block's
// largest element less than that, so fp8's lead is smaller if few elements have most of the norm.
TEST_P(Fp8Layer, ErrsLessThanHalfOfNvfp4) {
  if (declined()) GTEST_SKIP() << backend().name << " declines fp8";
  for (const auto& [kind, share] :
       {std::pair(DataKind::kNormal, 0.4), std::pair(DataKind::kOutliers, 0.5)}) {
    const double fp8 = test::format_error(backend(), ActivationFormat::kFp8, kind);
    const double nvfp4 = test::format_error(backend(), ActivationFormat::kNvfp4, kind);
    RecordProperty(std::string("fp8_relative_l2_") + to_string(kind), std::to_string(fp8));
    RecordProperty(std::string("nvfp4_relative_l2_") + to_string(kind), std::to_string(nvfp4));
    EXPECT_LE(fp8, share * nvfp4) << to_string(kind);
    EXPECT_GE(fp8, 0.02) << to_string(kind);  // if it were less, nothing would have been rounded
  }
}

// Each backend's own code finds shifts and counts, and both must be the contract's.
TEST_P(Fp8Layer, PacksWhatTheContractSays) {
  if (declined()) GTEST_SKIP() << backend().name << " declines fp8";
  for (const Case& spec : cases_named("fp8_shared_ep/")) {
    const auto data = make_case(spec);
    ASSERT_OK(data);
    test::CaseRun run(backend(), *data);
    ASSERT_TRUE(run.ok());
    std::vector<int> shifts;
    for (int64_t e = kSharedExpert; e < spec.range.count; ++e) {
      const ExpertSource source = data->expert(e);
      const Fp8ExpertWeights packed = run.weights().fp8_weights_of(e);
      const std::pair<const Nvfp4View&, const Fp8Weights&> matrices[] = {
          {source.gate, packed.gate}, {source.up, packed.up}, {source.down, packed.down}};
      for (const auto& [view, fp8] : matrices) {
        const test::OracleFp8Weights expected = test::oracle_fp8_weights(view);
        EXPECT_EQ(fp8, (Fp8Weights{expected.shift, expected.inexact}))
            << spec.name << " expert " << e;
        shifts.push_back(fp8.shift);
      }
    }
    EXPECT_LT(*std::min_element(shifts.begin(), shifts.end()), 0);
    EXPECT_GT(*std::max_element(shifts.begin(), shifts.end()), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Fp8Layer, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
