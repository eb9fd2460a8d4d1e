// What fp8 is for: an error against activations and weights that are not rounded far below NVFP4's; and what its packing
// tells.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "cases/cases.h"
#include "judge/judge.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/spec_oracle.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

// A layer with rows and output in fp32, so that what shows is the format's error and no rounding after it; the same
// weights in every format.
std::vector<float> same_weights_in(const Backend& backend, ActivationFormat format, DataKind kind) {
  Case spec;
  spec.name = "fp8_error";
  spec.options.num_experts = 8;
  spec.options.top_k = 2;
  spec.options.hidden_size = 512;
  spec.options.intermediate_size = 256;
  spec.options.row_format = RowFormat::kFp32;
  spec.range = {0, 8};
  spec.tokens = 48;
  spec.data = kind;
  spec.out_dtype = DType::kF32;
  auto data = make_case(spec);
  EXPECT_OK(data);
  data->spec.options.activation_format = format;
  data->config = *MoeConfig::make(data->spec.options);
  test::CaseRun host(backend, *data);
  EXPECT_TRUE(host.ok());
  return test::to_floats(host.run(*data), DType::kF32);
}

class Fp8Layer : public test::BackendTest {
 protected:
  bool declined() const { return test::declines(backend(), *MoeConfig::make(cases_named("fp8/").front().options)); }
};

// E4M3 rounds every element by 2.6 % rms, whatever lies beside it. NVFP4 rounds a block's largest element less than that,
// so that its lead is smaller where few elements have most of the norm.
TEST_P(Fp8Layer, ErrsLessThanHalfOfNvfp4) {
  if (declined()) GTEST_SKIP() << backend().name << " declines fp8";
  for (const auto& [kind, share] : {std::pair(DataKind::kNormal, 0.4), std::pair(DataKind::kOutliers, 0.5)}) {
    const std::vector<float> truth = same_weights_in(kReferenceBackend, ActivationFormat::kBf16, kind);
    const auto error = [&, kind = kind](ActivationFormat format) {
      const std::vector<float> actual = same_weights_in(backend(), format, kind);
      const Comparison c = compare(truth.data(), actual.data(), 48, 512);
      EXPECT_EQ(c.nonfinite_mismatches, 0);
      return c.relative_l2;
    };
    const double fp8 = error(ActivationFormat::kFp8), nvfp4 = error(ActivationFormat::kNvfp4);
    RecordProperty(std::string("fp8_relative_l2_") + to_string(kind), std::to_string(fp8));
    RecordProperty(std::string("nvfp4_relative_l2_") + to_string(kind), std::to_string(nvfp4));
    EXPECT_LE(fp8, share * nvfp4) << to_string(kind);
    EXPECT_GE(fp8, 0.02) << to_string(kind);  // less than this and nothing was rounded
  }
}

// Backends find shifts and counts by code of their own, and both are the contract's.
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
        EXPECT_EQ(fp8, (Fp8Weights{expected.shift, expected.inexact})) << spec.name << " expert " << e;
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
