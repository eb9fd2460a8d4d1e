// Properties that hold for every backend with any kernels, without knowledge of the right numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backend/layer_steps.h"
#include "cases/cases.h"
#include "core/executor.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

using test::CaseRun;

// Row `from` of an array of rows becomes row `to` of another.
void copy_row(const std::vector<uint8_t>& in, int64_t from, std::vector<uint8_t>& out, int64_t to,
              size_t row_bytes) {
  std::memcpy(out.data() + static_cast<size_t>(to) * row_bytes,
              in.data() + static_cast<size_t>(from) * row_bytes, row_bytes);
}
size_t row_bytes(const std::vector<uint8_t>& array, int64_t tokens) {
  return tokens == 0 ? 0 : array.size() / static_cast<size_t>(tokens);
}

// The case with only the tokens of `order`, in that order.
CaseData select_tokens(const CaseData& data, const std::vector<int64_t>& order) {
  CaseData result = data;
  const int64_t before = data.spec.tokens, top_k = data.spec.options.top_k;
  result.spec.tokens = static_cast<int64_t>(order.size());
  const size_t hidden = row_bytes(data.hidden, before), ids = row_bytes(data.topk_ids, before);
  result.hidden.resize(hidden * order.size());
  result.topk_ids.resize(ids * order.size());
  result.topk_weights.resize(order.size() * static_cast<size_t>(top_k));
  if (!data.shared_weights.empty()) result.shared_weights.resize(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    const auto to = static_cast<int64_t>(i);
    copy_row(data.hidden, order[i], result.hidden, to, hidden);
    copy_row(data.topk_ids, order[i], result.topk_ids, to, ids);
    for (int64_t k = 0; k < top_k; ++k)
      result.topk_weights[static_cast<size_t>(to * top_k + k)] =
          data.topk_weights[static_cast<size_t>(order[i] * top_k + k)];
    if (!data.shared_weights.empty())
      result.shared_weights[i] = data.shared_weights[static_cast<size_t>(order[i])];
  }
  return result;
}
std::vector<uint8_t> select_rows(const std::vector<uint8_t>& out, int64_t tokens,
                                 const std::vector<int64_t>& order) {
  const size_t width = row_bytes(out, tokens);
  std::vector<uint8_t> result(order.size() * width);
  for (size_t i = 0; i < order.size(); ++i)
    copy_row(out, order[i], result, static_cast<int64_t>(i), width);
  return result;
}

std::vector<int64_t> range_of(int64_t first, int64_t count) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), first);
  return order;
}

class Properties : public test::BackendTest {
 protected:
  // A few cases of each choice, or a third of them (tests/emulated); batch_invariant on, since most
  // properties compare bits across batches.
  void for_cases(const std::function<void(const CaseData&)>& body) {
    const int64_t every = std::getenv("NVFP4_MOE_FEWER_CASES") == nullptr ? 6 : 18;
    int64_t used = 0;
    for (Case spec : case_table()) {
      if (spec.tokens < 9 || spec.tokens > 33 || ++used % every != 0) continue;
      SCOPED_TRACE(spec.name);
      spec.options.batch_invariant = true;
      const auto data = make_case(spec);
      ASSERT_OK(data);
      if (test::declines(backend(), data->config)) continue;
      body(*data);
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
    EXPECT_GT(used, 40);
  }
  std::vector<uint8_t> run(const CaseData& data, Executor* executor = nullptr) {
    CaseRun host(backend(), data);
    EXPECT_TRUE(host.ok());
    std::vector<uint8_t> out = host.run(data, executor);
    EXPECT_EQ(host.broken_guard(), -1);
    return out;
  }
  static std::string same(const CaseData& data, const std::vector<uint8_t>& expected,
                          const std::vector<uint8_t>& actual) {
    return test::difference(expected, actual, data.spec.out_dtype, data.spec.options.hidden_size);
  }
};

// A third of the tokens in another order, then the others: each token keeps its bits in every
// batch.
TEST_P(Properties, TokenPermutationPermutesTheOutput) {
  for_cases([&](const CaseData& data) {
    const int64_t tokens = data.spec.tokens;
    std::vector<int64_t> order = range_of(0, tokens);
    std::shuffle(order.begin(), order.end(), std::mt19937(5));
    const auto third = order.begin() + tokens / 3;
    const std::vector<uint8_t> all = run(data);
    for (const std::vector<int64_t>& part :
         {order, std::vector(order.begin(), third), std::vector(third, order.end())})
      EXPECT_EQ(same(data, select_rows(all, tokens, part), run(select_tokens(data, part))), "");
  });
}

TEST_P(Properties, NanTokenSpoilsOnlyItsRow) {
  for_cases([&](const CaseData& data) {
    if (data.spec.data == DataKind::kNan || data.spec.data == DataKind::kHuge) return;
    CaseData spoilt = data;
    const int64_t hidden = data.spec.options.hidden_size;
    const int64_t victim = data.spec.tokens / 2;
    const size_t width = static_cast<size_t>(bits(data.spec.hidden_dtype)) / 8;
    // All bits set: NaN in each of the three formats.
    std::memset(spoilt.hidden.data() + static_cast<size_t>(victim * hidden + hidden / 3) * width,
                0xFF, width);
    bool has_row = data.spec.options.shared_intermediate_size > 0;
    for (int64_t k = 0; k < data.spec.options.top_k; ++k)
      has_row = has_row || data.spec.range.local(data.id(victim, k)).has_value();
    const std::vector<uint8_t> clean = run(data);
    CaseRun host(backend(), spoilt);
    const std::vector<uint8_t> out = host.run(spoilt);
    EXPECT_EQ(host.buffers().status->nonfinite_tokens, has_row ? 1u : 0u);
    const std::vector<float> values = test::to_floats(out, data.spec.out_dtype);
    for (int64_t c = 0; c < hidden; ++c) {
      const float value = values[static_cast<size_t>(victim * hidden + c)];
      ASSERT_TRUE(has_row ? std::isnan(value) : value == 0) << "channel " << c << ": " << value;
    }
    std::vector<int64_t> others = range_of(0, data.spec.tokens);
    others.erase(others.begin() + victim);
    EXPECT_EQ(same(data, select_rows(clean, data.spec.tokens, others),
                   select_rows(out, data.spec.tokens, others)),
              "");
  });
}

TEST_P(Properties, ThreadsDoNotShow) {
  const auto two = make_thread_pool(2), seven = make_thread_pool(7);
  for_cases([&](const CaseData& data) {
    const std::vector<uint8_t> one = run(data);
    EXPECT_EQ(same(data, one, run(data, two.get())), "");
    EXPECT_EQ(same(data, one, run(data, seven.get())), "");
  });
}

TEST_P(Properties, WorkspaceReplaysWithOtherContentsAndFewerTokens) {
  for_cases([&](const CaseData& data) {
    Case other_spec = data.spec;
    other_spec.seed += 7;
    const auto fresh = make_case(other_spec);
    ASSERT_OK(fresh);
    CaseData other = select_tokens(*fresh, range_of(1, data.spec.tokens - 3));
    other.experts = data.experts;
    other.tensor_scales = data.tensor_scales;

    CaseRun reused(backend(), data, data.spec.tokens + 5);
    reused.run(data);
    EXPECT_EQ(reused.broken_guard(), -1);
    const std::vector<uint8_t> second = reused.run(other);
    EXPECT_EQ(same(other, run(other), second), "");
    EXPECT_EQ(same(data, run(data), reused.run(data)), "");
    reused.poison();  // the arrays of fewer tokens have other offsets
    reused.run(other);
    EXPECT_EQ(reused.broken_guard(), -1);
  });
}

TEST_P(Properties, FewerRealTokensThanCaptured) {
  for_cases([&](const CaseData& data) {
    const int64_t real = data.spec.tokens - 4;
    CaseData padded = data;
    for (int64_t t = real; t < data.spec.tokens; ++t)
      for (int64_t k = 0; k < data.spec.options.top_k; ++k) padded.set_id(t, k, -1);
    const std::vector<uint8_t> out = run(padded);
    EXPECT_EQ(same(data, run(select_tokens(data, range_of(0, real))),
                   select_rows(out, data.spec.tokens, range_of(0, real))),
              "");
    if (data.spec.options.shared_intermediate_size > 0) return;
    for (float value : test::to_floats(select_rows(out, data.spec.tokens, range_of(real, 4)),
                                       data.spec.out_dtype))
      ASSERT_EQ(value, 0);
  });
}

TEST_P(Properties, ZeroTokensAreANoOp) {
  Case spec = cases_named("w4a4/").front();
  spec.tokens = 0;
  const auto data = make_case(spec);
  ASSERT_OK(data);
  CaseRun host(backend(), *data, 8);
  EXPECT_TRUE(host.run(*data).empty());
  EXPECT_EQ(host.broken_guard(), -1);
  EXPECT_EQ(host.buffers().status->hidden_blocks, 0u);
  EXPECT_EQ(host.buffers().routed.row_offsets[spec.range.count], 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, Properties, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
