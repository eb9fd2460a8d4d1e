// A small batch's intermediate under fp8 on Hopper: gemm2 converts it to E4M3 with the same bits as
// requantize.

#include <string>
#include <utility>
#include <vector>

#include "cases/cases.h"
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
Case spec_of(int64_t tokens) {
  Case spec = ragged_case({16, 2, tokens, Routing::kUniform}, ActivationFormat::kFp8);
  spec.options.hidden_size = 528;
  spec.options.intermediate_size = 656;
  return spec;
}
// A long row takes several batches of reads, the last one partial, and whole tiles of it wrap
// around the pipeline eight times or more.
Case long_rows(int64_t intermediate, bool whole_tiles) {
  Case spec = ragged_case({64, 2, 1, Routing::kUniform}, ActivationFormat::kFp8);
  spec.options.hidden_size = 64;
  spec.options.intermediate_size = intermediate;
  spec.options.batch_invariant = whole_tiles;
  return spec;
}

// Returns the run's counts. gemm_config: see Limits.
RunStatus expect_bits_of_the_steps(const Case& spec, int gemm_config = -1) {
  SCOPED_TRACE(testing::Message() << spec.tokens << " tokens of " << spec.options.intermediate_size
                                  << ", configuration " << gemm_config);
  const auto data = must(make_case(spec));
  CaseRun whole(kSm90Backend, *data, -1, gemm_config), parts(kSm90Backend, *data, -1, gemm_config);
  EXPECT_TRUE(whole.ok() && parts.ok());
  const auto steps = kSm90Backend.describe_run(data->config, spec.range, whole.plan(), spec.tokens);
  EXPECT_EQ(steps[3].kernel, "fp8_by_gemm2");
  const std::vector<uint8_t> out = run_against_steps(whole, parts, *data);
  EXPECT_EQ(whole.run(*data), out) << "a repeat differs";
  return *whole.buffers().status;
}

TEST_F(Sm90SmallRequantize, BitsAndCountsOfTheSteps) {
  Case spec = spec_of(3);
  for (const int config : {0, 1}) {
    EXPECT_EQ(expect_bits_of_the_steps(spec, config).intermediate_blocks, 3u * 2 * 656 / 16);
    expect_bits_of_the_steps(long_rows(3088, config == 0), config);
  }
  spec.data = DataKind::kNan;
  EXPECT_GT(expect_bits_of_the_steps(spec).nonfinite_rows, 0u);
}

// From one row a tile to several, in tiles of 256 weight rows and of 512, with experts of more rows
// than a tile has.
TEST_F(Sm90Requantize, EveryNumberOfTokensAndLengthOfRows) {
  for (const int config : {0, 1}) {
    for (int64_t tokens = 1; tokens <= 16; ++tokens)
      expect_bits_of_the_steps(spec_of(tokens), config);
    Case spec = spec_of(12);
    spec.routing = Routing::kOneExpert;
    expect_bits_of_the_steps(spec, config);
    for (const int64_t intermediate : {16, 48, 4624, 8208})
      for (const bool whole_tiles : {false, true})
        expect_bits_of_the_steps(long_rows(intermediate, whole_tiles), config);
  }
}

TEST_F(Sm90Requantize, EveryKindOfValues) {
  for (const bool fixed : {false, true})
    for (const DataKind values :
         {DataKind::kNormal, DataKind::kOutliers, DataKind::kTiny, DataKind::kZeros,
          DataKind::kSaturating, DataKind::kNan, DataKind::kHuge}) {
      SCOPED_TRACE(testing::Message() << to_string(values) << (fixed ? ", fixed" : ""));
      Case spec = spec_of(7);
      if (fixed) {
        spec.options.intermediate_scale = IntermediateScale::kFixed;
        spec.options.intermediate_fixed = 0x1p-5f;
      }
      spec.data = values;
      const RunStatus status = expect_bits_of_the_steps(spec);
      EXPECT_EQ(status.nonfinite_rows > 0, values == DataKind::kNan || values == DataKind::kHuge);
      EXPECT_TRUE(!fixed || values != DataKind::kSaturating || status.intermediate_saturated > 0);
      EXPECT_TRUE(!fixed || values != DataKind::kTiny || status.intermediate_zeroed > 0);
    }
}

TEST_F(Sm90Requantize, EveryKindOfLayer) {
  const std::pair<const char*, void (*)(Case&)> kinds[] = {
      {"relu2", [](Case& c) { c.options.activation = Activation::kRelu2; }},
      {"situ", [](Case& c) { set_situ(c.options); }},
      {"biases",
       [](Case& c) {
         c.options.activation = Activation::kSwigluOai;
         c.options.swiglu_limit = 7;
         c.options.expert_biases = true;
       }},
      {"no rows", [](Case& c) { c.routing = Routing::kAllNone; }},
      {"bad ids", [](Case& c) { c.routing = Routing::kBadIds; }},
      {"a part of the experts",
       [](Case& c) {
         c.range = {4, 8};
       }},
      {"rows in bf16", [](Case& c) { c.options.row_format = RowFormat::kBf16; }},
      {"whole tiles", [](Case& c) { c.options.batch_invariant = true; }},
      {"a static scale of hidden",
       [](Case& c) {
         c.options.activation_scale = ActivationScale::kStatic;
         c.options.intermediate_scale = IntermediateScale::kFixed;
       }},
      // Up to eight tokens the shared expert uses such a gemm2 too, and its counts are added to the
      // routed ones.
      {"a shared expert", [](Case& c) {
         c.options.shared_intermediate_size = 144;
         c.data = DataKind::kNan;
       }}};
  for (const auto& [name, edit] : kinds)
    for (const int64_t tokens : {1, 6, 16}) {
      SCOPED_TRACE(name);
      Case spec = spec_of(tokens);
      edit(spec);
      expect_bits_of_the_steps(spec);
    }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
