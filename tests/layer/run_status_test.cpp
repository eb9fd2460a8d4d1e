// What a run counts of router weights and outputs that are not finite, against a scan of its own inputs and outputs.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe {
namespace {

class RunStatusCounts : public test::BackendTest {
 protected:
  struct Counts {
    uint64_t weights = 0, outputs = 0;
  };

  // Both counts of a run of `data` in `host`, which must be what is found by looking.
  static Counts run(test::CaseRun& host, const CaseData& data) {
    const std::vector<uint8_t> bytes = host.run(data);
    EXPECT_EQ(host.broken_guard(), -1);
    Counts found;
    for (const float value : test::to_floats(bytes, data.spec.out_dtype)) found.outputs += !std::isfinite(value);
    const MoeOptions& options = data.spec.options;
    const ExpertRange range = data.spec.range;
    for (int64_t token = 0; token < data.spec.tokens; ++token) {
      for (int64_t k = 0; k < options.top_k; ++k)
        if (const int64_t local = data.id(token, k) - range.first; local >= 0 && local < range.count)
          found.weights += !std::isfinite(data.topk_weights[static_cast<size_t>(token * options.top_k + k)]);
      if (options.shared_intermediate_size > 0 && !data.shared_weights.empty())
        found.weights += !std::isfinite(data.shared_weights[static_cast<size_t>(token)]);
    }
    const RunStatus& status = *host.buffers().status;
    EXPECT_EQ(status.nonfinite_weights, found.weights);
    EXPECT_EQ(status.nonfinite_outputs, found.outputs);
    return found;
  }

  // Layers of every position of the router weight, with few and many choices, part of the experts, and a shared expert.
  void for_layers(const std::function<void(Case)>& body) {
    for (const RouterWeight position : {RouterWeight::kAfterDown, RouterWeight::kBeforeDown, RouterWeight::kOnInput})
      for (const int64_t top_k : {1, 2, 13})
        for (const int64_t shared : {0, 48})
          for (const DType out : {DType::kBf16, DType::kF16, DType::kF32}) {
            if (position == RouterWeight::kOnInput && top_k != 1) continue;
            Case spec;
            spec.name = std::string(to_string(position)) + " k" + std::to_string(top_k) + " shared " +
                        std::to_string(shared) + " " + to_string(out);
            spec.options.num_experts = 16;
            spec.options.top_k = top_k;
            spec.options.hidden_size = 128;
            spec.options.intermediate_size = 64;
            spec.options.shared_intermediate_size = shared;
            spec.options.router_weight = position;
            spec.options.activation_format = ActivationFormat::kBf16;
            spec.range = {4, 8};  // some choices are of another rank's experts
            spec.tokens = 33;
            spec.routing = Routing::kBadIds;
            spec.out_dtype = out;
            spec.shared_weights = shared > 0;
            SCOPED_TRACE(spec.name);
            body(spec);
          }
  }
};

TEST_P(RunStatusCounts, RouterWeightsThatAreNotFinite) {
  uint64_t weights = 0, outputs = 0;
  for_layers([&](const Case& spec) {
    const auto made = make_case(spec);
    ASSERT_OK(made);
    if (test::declines(backend(), made->config)) return;
    CaseData data = *made;
    constexpr float kLarge = std::numeric_limits<float>::infinity();
    const float planted[] = {std::numeric_limits<float>::quiet_NaN(), kLarge, -kLarge};
    for (size_t i = 0; i < data.topk_weights.size(); i += 5) data.topk_weights[i] = planted[i % 3];
    for (size_t i = 0; i < data.shared_weights.size(); i += 7) data.shared_weights[i] = planted[i % 3];
    test::CaseRun host(backend(), data);
    ASSERT_TRUE(host.ok());
    const Counts found = run(host, data);
    EXPECT_GT(found.weights, 0u);
    EXPECT_LT(found.weights, data.topk_weights.size());
    weights += found.weights, outputs += found.outputs;
    // The next run in the same workspace begins at 0.
    const Counts clean = run(host, *made);
    EXPECT_EQ(clean.weights + clean.outputs, 0u);
  });
  EXPECT_GT(weights, 0u);
  EXPECT_GT(outputs, weights);
}

// Finite tokens and weights: what is not finite in the output has overflowed.
TEST_P(RunStatusCounts, OutputsThatOverflow) {
  uint64_t overflowed[2] = {};  // of 16 bits, of fp32
  for_layers([&](const Case& spec) {
    if (spec.options.router_weight != RouterWeight::kAfterDown) return;  // where the weight may be as large as it likes
    for (const float factor : {1e3f, 1e5f, 3e38f}) {
      auto data = make_case(spec);
      ASSERT_OK(data);
      if (test::declines(backend(), data->config)) return;
      for (float& weight : data->topk_weights) weight = weight < 0.5f ? factor : -factor;
      for (float& weight : data->shared_weights) weight = factor;
      test::CaseRun host(backend(), *data);
      ASSERT_TRUE(host.ok());
      const Counts found = run(host, *data);
      EXPECT_EQ(found.weights, 0u);
      EXPECT_EQ(host.buffers().status->nonfinite_tokens, 0u);
      overflowed[spec.out_dtype == DType::kF32] += found.outputs;
    }
  });
  EXPECT_GT(overflowed[0], 0u);
  EXPECT_GT(overflowed[1], 0u);
}

TEST_P(RunStatusCounts, ATokenThatIsNotFinite) {
  for_layers([&](Case spec) {
    spec.data = DataKind::kNan;
    spec.routing = Routing::kUniform;
    spec.range = {0, 16};
    if (spec.out_dtype == DType::kF16) spec.hidden_dtype = DType::kF16;
    const auto data = make_case(spec);
    ASSERT_OK(data);
    if (test::declines(backend(), data->config)) return;
    test::CaseRun host(backend(), *data);
    ASSERT_TRUE(host.ok());
    const Counts found = run(host, *data);
    EXPECT_EQ(found.weights, 0u);
    const uint64_t tokens = host.buffers().status->nonfinite_tokens;
    EXPECT_GT(tokens, 0u);
    EXPECT_EQ(found.outputs, tokens * static_cast<uint64_t>(spec.options.hidden_size));
  });
}

// More tokens and channels than one thread or one CTA has, single elements among them.
TEST_P(RunStatusCounts, OfManyTokens) {
  Case spec;
  spec.name = "many";
  spec.options.num_experts = 8;
  spec.options.top_k = 2;
  spec.options.hidden_size = 4096 + 16;
  spec.options.intermediate_size = 16;
  spec.options.activation_format = ActivationFormat::kBf16;
  spec.range = {0, 8};
  spec.tokens = 300;
  spec.out_dtype = DType::kF16;
  auto data = make_case(spec);
  ASSERT_OK(data);
  if (test::declines(backend(), data->config)) GTEST_SKIP();
  for (size_t i = 0; i < data->topk_weights.size(); ++i) data->topk_weights[i] = i % 3 == 0 ? 2e4f : 0.25f;
  test::CaseRun host(backend(), *data);
  ASSERT_TRUE(host.ok());
  const Counts found = run(host, *data);
  EXPECT_EQ(found.weights, 0u);
  EXPECT_GT(found.outputs, 0u);
  EXPECT_LT(found.outputs, static_cast<uint64_t>(spec.tokens * spec.options.hidden_size));
}

INSTANTIATE_TEST_SUITE_P(Backends, RunStatusCounts, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe
