// router_weight on_input, by its definition: the routed experts get hidden times the weight, and
// the shared expert gets hidden itself.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "backend/layer_steps.h"
#include "cases/cases.h"
#include "core/float_formats.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

float narrow(float x, DType dtype) {
  if (dtype == DType::kBf16) return bf16_to_float(bf16_from_float(x));
  return dtype == DType::kF16 ? fp16_to_float(fp16_from_float(x)) : x;
}

class OnInput : public test::BackendTest {
 protected:
  struct Output {
    std::vector<uint8_t> bytes;
    std::vector<float> values;  // (T, H)
    RunStatus status;
  };
  Output run(const CaseData& data) {
    test::CaseRun host(backend(), data);
    EXPECT_TRUE(host.ok());
    Output output;
    output.bytes = host.run(data);
    output.values = test::to_floats(output.bytes, data.spec.out_dtype);
    output.status = *host.buffers().status;
    EXPECT_EQ(host.broken_guard(), -1);
    return output;
  }
  static Case spec_of(ActivationFormat format, DType hidden_dtype, int64_t shared_size) {
    Case spec = cases_named("w4a4_on_input/e16_k1_h256_i128/").front();
    spec.options.activation_format = format;
    spec.options.shared_intermediate_size = shared_size;
    spec.options.batch_invariant = true;
    spec.hidden_dtype = hidden_dtype;
    spec.routing = Routing::kPartlyNone;
    spec.data = DataKind::kNormal;
    spec.tokens = 40;
    return spec;
  }
  // The same layer with the weight on the output.
  static CaseData after_down(const CaseData& data) {
    CaseData other = data;
    other.spec.options.router_weight = RouterWeight::kAfterDown;
    other.config = *MoeConfig::make(other.spec.options);
    return other;
  }
  void for_layers(int64_t shared_size, const std::function<void(const CaseData&)>& body) {
    for (const ActivationFormat format : test::kActivationFormats)
      for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
        SCOPED_TRACE(std::string(to_string(format)) + " " + to_string(dtype));
        const auto data = make_case(spec_of(format, dtype, shared_size));
        ASSERT_OK(data);
        if (!test::declines(backend(), data->config)) body(*data);
      }
  }
};

// Both numbers and their product have hidden's dtype. Otherwise the layer equals one that gets the
// product.
TEST_P(OnInput, IsALayerOfWeightedHidden) {
  for_layers(0, [&](const CaseData& data) {
    CaseData by_hand = after_down(data);
    const DType dtype = data.spec.hidden_dtype;
    const int64_t hidden = data.spec.options.hidden_size;
    std::vector<float> x = test::to_floats(data.hidden, dtype);
    for (size_t i = 0; i < x.size(); ++i) {
      const float weight = narrow(data.topk_weights[i / static_cast<size_t>(hidden)], dtype);
      const uint16_t half =
          dtype == DType::kBf16 ? bf16_from_float(x[i] * weight) : fp16_from_float(x[i] * weight);
      const float whole = x[i] * weight;
      if (dtype == DType::kF32)
        std::memcpy(by_hand.hidden.data() + 4 * i, &whole, 4);
      else
        std::memcpy(by_hand.hidden.data() + 2 * i, &half, 2);
    }
    by_hand.topk_weights.assign(data.topk_weights.size(), 1.0f);
    const Output expected = run(by_hand), actual = run(data), ignored = run(after_down(data));
    EXPECT_EQ(test::difference(expected.bytes, actual.bytes, data.spec.out_dtype, hidden), "");
    EXPECT_EQ(expected.status.hidden_blocks, actual.status.hidden_blocks);
    EXPECT_NE(test::difference(ignored.bytes, actual.bytes, data.spec.out_dtype, hidden), "");
  });
}

// In fp32 throughout, a token's output is the sum of its two experts' separate outputs.
TEST_P(OnInput, TheSharedExpertGetsHiddenItself) {
  for_layers(96, [&](const CaseData& given) {
    Case spec = given.spec;
    spec.options.row_format = RowFormat::kFp32;
    spec.out_dtype = DType::kF32;
    const CaseData both = *make_case(spec);
    spec.options.shared_intermediate_size = 0;
    const CaseData routed = *make_case(spec);
    CaseData shared = after_down(both);
    for (int64_t t = 0; t < spec.tokens; ++t) shared.set_id(t, 0, -1);
    const Output sum = run(both), first = run(routed), second = run(shared);
    for (size_t i = 0; i < sum.values.size(); ++i)
      ASSERT_EQ(sum.values[i], first.values[i] + second.values[i]) << "element " << i;
    EXPECT_EQ(sum.status.hidden_blocks, first.status.hidden_blocks + second.status.hidden_blocks);
  });
}

// A product that is not finite makes its token nonfinite, as hidden does; a weight that is never
// multiplied is ignored.
TEST_P(OnInput, AWeightThatIsNotFiniteSpoilsItsToken) {
  for (const int64_t shared_size : {0, 96})
    for_layers(shared_size, [&](const CaseData& data) {
      const Output clean = run(data);
      const int64_t hidden = data.spec.options.hidden_size;
      CaseData spoilt = data;
      uint64_t expected = 0;
      std::vector<bool> nan(static_cast<size_t>(data.spec.tokens));
      const float bad[] = {std::nanf(""), kInf, -kInf};
      for (int64_t t = 0; t < data.spec.tokens; t += 2) {
        spoilt.topk_weights[static_cast<size_t>(t)] = bad[t / 2 % 3];
        nan[static_cast<size_t>(t)] = data.id(t, 0) >= 0;
        expected += data.id(t, 0) >= 0;
      }
      const size_t width =
          static_cast<size_t>(bits(data.spec.hidden_dtype)) / 8;  // and NaN in hidden counts once
      std::memset(spoilt.hidden.data(), 0xFF, width);
      if (!nan[0] && shared_size > 0) nan[0] = true, ++expected;
      const Output out = run(spoilt);
      EXPECT_EQ(out.status.nonfinite_tokens, expected);
      EXPECT_GT(expected, 0u);
      for (size_t i = 0; i < out.values.size(); ++i) {
        if (nan[i / static_cast<size_t>(hidden)])
          ASSERT_TRUE(std::isnan(out.values[i])) << "element " << i;
        else
          ASSERT_EQ(out.values[i], clean.values[i]) << "element " << i;
      }
    });
}

INSTANTIATE_TEST_SUITE_P(Backends, OnInput, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
