#include "support/ragged.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "judge/judge.h"
#include "moe/registry.h"
#include "support/case_run.h"
#include "support/sizes.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

Case ragged_case(const Ragged& ragged, ActivationFormat format) {
  Case spec;
  spec.options = test::sizes_of(ragged.experts, ragged.top_k, 1040, 720);
  spec.options.activation_format = format;
  spec.options.row_format = RowFormat::kFp32;
  spec.range = {0, ragged.experts};
  spec.tokens = ragged.tokens;
  spec.routing = ragged.routing;
  spec.out_dtype = DType::kF32;
  return spec;
}

void expect_run_is_its_steps(const Backend& backend, int64_t tokens, IntermediateScale scale,
                             DataKind values, ActivationFormat format) {
  SCOPED_TRACE(testing::Message() << tokens << " tokens, " << to_string(scale) << ", "
                                  << to_string(values));
  Case small = ragged_case({4, 2, tokens, Routing::kUniform}, format);
  small.options.hidden_size = 528;
  small.options.intermediate_size = 656;
  small.options.shared_intermediate_size = 144;
  small.options.intermediate_scale = scale;
  if (scale == IntermediateScale::kFixed) small.options.intermediate_fixed = 0x1p-9f;
  small.data = values;
  const auto data = make_case(small);
  ASSERT_OK(data);
  CaseRun whole(backend, *data), parts(backend, *data);
  ASSERT_TRUE(whole.ok() && parts.ok());
  run_against_steps(whole, parts, *data);
}

std::vector<uint8_t> run_against_steps(CaseRun& whole, CaseRun& parts, const CaseData& data) {
  const std::vector<uint8_t> out = whole.run(data);
  EXPECT_EQ(
      difference(parts.run_steps(data), out, data.spec.out_dtype, data.spec.options.hidden_size),
      "");
  EXPECT_EQ(std::memcmp(whole.buffers().status, parts.buffers().status, sizeof(RunStatus)), 0);
  EXPECT_EQ(whole.broken_guard(), -1);
  return out;
}

std::string beyond_limits(const CaseData& data, const std::vector<uint8_t>& expected,
                          const std::vector<uint8_t>& actual) {
  const Case& spec = data.spec;
  const std::vector<float> e = to_floats(expected, spec.out_dtype),
                           a = to_floats(actual, spec.out_dtype);
  return broken_limit(compare(e.data(), a.data(), spec.tokens, spec.options.hidden_size),
                      layer_limits(data.config, spec.tokens));
}

void expect_agrees_with_plain(const Backend& backend, const CaseData& data, int repeats) {
  const Backend* const plain_backend = find_backend("cuda");
  ASSERT_NE(plain_backend, nullptr);
  CaseRun plain(*plain_backend, data), own(backend, data);
  ASSERT_TRUE(plain.ok() && own.ok());
  const std::vector<uint8_t> bytes = own.run(data);
  EXPECT_EQ(beyond_limits(data, plain.run(data), bytes), "");
  EXPECT_EQ(own.broken_guard(), -1);
  for (int again = 0; again < repeats; ++again)
    ASSERT_EQ(own.run(data), bytes) << "a repeat differs";
}

}  // namespace nvfp4_moe::internal::test
