// Whole layers: every backend against the reference within the derived limits, and wrong layers
// beyond them.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "backend/layer_steps.h"
#include "cases/cases.h"
#include "judge/judge.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

std::vector<float> output(const Backend& backend, const CaseData& data) {
  test::CaseRun host(backend, data);
  EXPECT_TRUE(host.ok());
  return test::to_floats(host.run(data), data.spec.out_dtype);
}

std::string verdict(const CaseData& data, const std::vector<float>& expected,
                    const std::vector<float>& actual) {
  return broken_limit(
      compare(expected.data(), actual.data(), data.spec.tokens, data.spec.options.hidden_size),
      layer_limits(data.config, data.spec.tokens));
}

class WholeLayer : public test::BackendTest {};

TEST_P(WholeLayer, AgreesWithTheReference) {
  for (const Case& spec : case_table()) {
    SCOPED_TRACE(spec.name);
    if (test::declines(backend(), *MoeConfig::make(spec.options))) continue;
    const auto data = make_case(spec);
    ASSERT_OK(data);
    EXPECT_EQ(verdict(*data, output(kReferenceBackend, *data), output(backend(), *data)), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, WholeLayer, ::testing::ValuesIn(test::judged_backends()),
                         test::hardware_test_name<Backend>);

void other_format(CaseData& data, int steps) {
  auto& format = data.spec.options.activation_format;
  format = static_cast<ActivationFormat>((static_cast<int>(format) + steps) % 4);
}

// A layer that silently computes another named choice, or misreads its weights, is out of limits.
TEST(WrongLayer, IsOutOfLimits) {
  const auto cases = {
      cases_named("w4a4_clamped/e16_k4_h256_i128/"), cases_named("w4a16_clamped/e16_k4_h256_i128/"),
      cases_named("w4a8_clamped/e16_k4_h256_i128/"), cases_named("fp8_clamped/e16_k4_h256_i128/")};
  const std::vector<std::pair<const char*, std::function<void(CaseData&)>>> faults = {
      {"swapped gate and up",
       [](CaseData& d) {
         for (ExpertBuffers& e : d.experts) std::swap(e.gate, e.up);
       }},
      {"gate's tensor scale for up",
       [](CaseData& d) {
         for (TensorScales& s : d.tensor_scales) s.up = s.gate;
       }},
      {"reciprocal tensor scale",
       [](CaseData& d) { d.tensor_scales[1].down = 1 / d.tensor_scales[1].down; }},
      {"nibbles swapped",
       [](CaseData& d) {
         for (ExpertBuffers& e : d.experts)
           for (uint8_t& byte : e.down.codes) byte = static_cast<uint8_t>(byte << 4 | byte >> 4);
       }},
      {"block scales one along",
       [](CaseData& d) {
         for (ExpertBuffers& e : d.experts)
           std::rotate(e.gate.block_scales.begin(), e.gate.block_scales.begin() + 1,
                       e.gate.block_scales.end());
       }},
      {"experts off by one",
       [](CaseData& d) { std::rotate(d.experts.begin(), d.experts.begin() + 1, d.experts.end()); }},
      {"router weights of the next token",
       [](CaseData& d) {
         std::rotate(d.topk_weights.begin(), d.topk_weights.begin() + d.spec.options.top_k,
                     d.topk_weights.end());
       }},
      {"no clamp", [](CaseData& d) { d.spec.options.swiglu_limit = 1e30f; }},
      {"swiglu_oai", [](CaseData& d) { d.spec.options.activation = Activation::kSwigluOai; }},
      {"the next activation format", [](CaseData& d) { other_format(d, 1); }},
      {"the activation format after it", [](CaseData& d) { other_format(d, 2); }},
      {"the last other activation format", [](CaseData& d) { other_format(d, 3); }},
  };
  for (const auto& list : cases) {
    ASSERT_FALSE(list.empty());
    Case spec = list.front();
    spec.routing = Routing::kUniform;
    spec.data = DataKind::kNormal;
    const auto data = make_case(spec);
    ASSERT_OK(data);
    const std::vector<float> expected = output(kReferenceBackend, *data);
    for (const auto& [name, plant] : faults) {
      SCOPED_TRACE(spec.name + ": " + name);
      CaseData wrong = *data;
      plant(wrong);
      wrong.config = *MoeConfig::make(wrong.spec.options);
      EXPECT_NE(verdict(*data, expected, output(kReferenceBackend, wrong)), "");
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal
