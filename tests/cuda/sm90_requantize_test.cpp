// A small batch's intermediate under fp8 on Hopper: gemm2 converts it to E4M3 with the same bits as
// requantize.

#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/ragged.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

class Sm90Requantize : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = why_not_here(kSm90Backend);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};
// The same with few and small layers.
using Sm90SmallRequantize = Sm90Requantize;

// K of gemm2 is not a multiple of a k-block, and its tiles are split.
Case spec_of(int64_t tokens, int64_t experts = 16) {
  Case spec = ragged_case({experts, 2, tokens, Routing::kUniform}, ActivationFormat::kFp8);
  spec.options.hidden_size = 528;
  spec.options.intermediate_size = 656;
  return spec;
}

std::string requantize_of(const CaseData& data, const CaseRun& run) {
  for (const StepPlan& step :
       kSm90Backend.describe_run(data.config, data.spec.range, run.plan(), data.spec.tokens))
    if (step.step == "requantize") return step.kernel;
  return "no such step";
}

// Returns the run's counts. gemm_config: see Limits.
RunStatus expect_bits_of_the_steps(const Case& spec, int gemm_config = -1) {
  const auto data = make_case(spec);
  EXPECT_OK(data);
  CaseRun whole(kSm90Backend, *data, -1, gemm_config), parts(kSm90Backend, *data, -1, gemm_config);
  if (!whole.ok() || !parts.ok()) return {};
  EXPECT_EQ(requantize_of(*data, whole), "fp8_by_gemm2");
  const std::vector<uint8_t> out = parts.run_steps(*data);
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(difference(out, whole.run(*data), spec.out_dtype, spec.options.hidden_size), "");
    EXPECT_EQ(std::memcmp(whole.buffers().status, parts.buffers().status, sizeof(RunStatus)), 0);
    EXPECT_EQ(whole.broken_guard(), -1);
  }
  return *whole.buffers().status;
}

TEST_F(Sm90SmallRequantize, BitsAndCountsOfTheSteps) {
  Case spec = spec_of(3);
  for (const int config : {0, 1})
    EXPECT_EQ(expect_bits_of_the_steps(spec, config).intermediate_blocks, 3u * 2 * 656 / 16);
  spec.data = DataKind::kNan;
  EXPECT_GT(expect_bits_of_the_steps(spec).nonfinite_rows, 0u);
}

// From one row a tile to several, in tiles of 256 weight rows and of 512, with experts of more rows
// than a tile has.
TEST_F(Sm90Requantize, EveryNumberOfTokens) {
  for (const int config : {0, 1}) {
    for (int64_t tokens = 1; tokens <= 16; ++tokens) {
      SCOPED_TRACE(testing::Message() << tokens << " tokens, configuration " << config);
      const RunStatus status = expect_bits_of_the_steps(spec_of(tokens), config);
      EXPECT_EQ(status.intermediate_blocks, static_cast<uint64_t>(tokens) * 2 * 656 / 16);
      EXPECT_EQ(status.nonfinite_rows, 0u);
    }
    Case spec = spec_of(12);
    spec.routing = Routing::kOneExpert;
    expect_bits_of_the_steps(spec, config);
  }
}

// A row of 8208 elements takes several batches of reads, the last one partial, and whole tiles of
// it wrap around the pipeline eight times or more.
void expect_long_rows(std::initializer_list<int64_t> sizes) {
  for (const int64_t intermediate : sizes)
    for (const int config : {0, 1})
      for (const bool whole_tiles : {false, true}) {
        SCOPED_TRACE(testing::Message() << intermediate << ", configuration " << config
                                        << ", whole tiles " << whole_tiles);
        Case spec = spec_of(1, 64);
        spec.options.hidden_size = 64;
        spec.options.intermediate_size = intermediate;
        spec.options.batch_invariant = whole_tiles;
        expect_bits_of_the_steps(spec, config);
      }
}
TEST_F(Sm90SmallRequantize, LongRows) { expect_long_rows({3088}); }
TEST_F(Sm90Requantize, LongRows) { expect_long_rows({16, 48, 4624, 8208}); }

TEST_F(Sm90Requantize, EveryKindOfValues) {
  for (const IntermediateScale scale :
       {IntermediateScale::kDynamicToken, IntermediateScale::kFixed})
    for (const DataKind values :
         {DataKind::kNormal, DataKind::kOutliers, DataKind::kTiny, DataKind::kZeros,
          DataKind::kSaturating, DataKind::kNan, DataKind::kHuge}) {
      SCOPED_TRACE(std::string(to_string(scale)) + ", " + to_string(values));
      Case spec = spec_of(7);
      spec.options.intermediate_scale = scale;
      if (scale == IntermediateScale::kFixed) spec.options.intermediate_fixed = 0x1p-5f;
      spec.data = values;
      const RunStatus status = expect_bits_of_the_steps(spec);
      const bool fixed = scale == IntermediateScale::kFixed;
      EXPECT_EQ(status.nonfinite_rows > 0, values == DataKind::kNan || values == DataKind::kHuge);
      EXPECT_EQ(status.nonfinite_tokens > 0, values == DataKind::kNan);
      if (values == DataKind::kHuge || values == DataKind::kNan) continue;
      if (!fixed) {
        EXPECT_EQ(status.intermediate_saturated, 0u);
      } else if (values == DataKind::kSaturating) {
        EXPECT_GT(status.intermediate_saturated, 0u);
      } else if (values == DataKind::kTiny) {
        EXPECT_GT(status.intermediate_zeroed, 0u);
      }
    }
}

TEST_F(Sm90Requantize, EveryKindOfLayer) {
  const auto expect = [](const char* name, int64_t tokens, void (*edit)(Case&)) {
    SCOPED_TRACE(name);
    Case spec = spec_of(tokens);
    edit(spec);
    return expect_bits_of_the_steps(spec);
  };
  for (const int64_t tokens : {1, 6, 16}) {
    SCOPED_TRACE(tokens);
    expect("relu2", tokens, [](Case& c) { c.options.activation = Activation::kRelu2; });
    expect("biases", tokens, [](Case& c) {
      c.options.activation = Activation::kSwigluOai;
      c.options.swiglu_limit = 7;
      c.options.expert_biases = true;
    });
    expect("none", tokens, [](Case& c) { c.routing = Routing::kAllNone; });
    expect("partly none", tokens, [](Case& c) { c.routing = Routing::kPartlyNone; });
    expect("bad ids", tokens, [](Case& c) { c.routing = Routing::kBadIds; });
    expect("a part of the experts", tokens, [](Case& c) { c.range = {4, 8}; });
    expect("rows in bf16", tokens, [](Case& c) { c.options.row_format = RowFormat::kBf16; });
    expect("whole tiles", tokens, [](Case& c) { c.options.batch_invariant = true; });
    expect("a static scale of hidden", tokens, [](Case& c) {
      c.options.activation_scale = ActivationScale::kStatic;
      c.options.intermediate_scale = IntermediateScale::kFixed;
    });
    // Up to eight tokens the shared expert uses such a gemm2 too, and its counts are added to the
    // routed ones.
    const RunStatus status = expect("a shared expert", tokens, [](Case& c) {
      c.options.shared_intermediate_size = 144;
      c.data = DataKind::kNan;
    });
    EXPECT_GT(status.nonfinite_rows, 0u);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
