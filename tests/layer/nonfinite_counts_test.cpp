// A run's counts of non-finite weights and outputs against a scan of its inputs and of out: for
// every backend, router_weight, type and alignment of out, with one token and with thousands.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "backend/layer_steps.h"
#include "cases/cases.h"
#include "core/random.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/sizes.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity(),
                kQuietNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kBad[] = {kQuietNan, kInfinity, -kInfinity, -kQuietNan};
constexpr DType kDTypes[] = {DType::kBf16, DType::kF16, DType::kF32};

template <class T, size_t kCount>
T one_of(Random& random, const T (&values)[kCount]) {
  return values[static_cast<size_t>(random.below(kCount))];
}

// This rank has experts 8 to 23 of 32.
Case spec_of(RouterWeight mode, int64_t top_k, int64_t tokens, DType out) {
  Case spec;
  spec.options = test::sizes_of(32, top_k, 80, 48);
  spec.options.router_weight = mode;
  if (mode == RouterWeight::kBeforeDown) spec.options.max_router_weight = 2.0f;
  spec.options.batch_invariant = true;
  spec.range = {8, 16};
  spec.tokens = tokens;
  spec.out_dtype = out;
  return spec;
}

float& weight(CaseData& data, int64_t token, int64_t k) {
  return data.topk_weights[static_cast<size_t>(token * data.spec.options.top_k + k)];
}

uint64_t nonfinite_weights(const CaseData& data) {
  uint64_t count = 0;
  const ExpertRange& range = data.spec.range;
  for (int64_t t = 0; t < data.spec.tokens; ++t) {
    for (int64_t k = 0; k < data.spec.options.top_k; ++k) {
      const int64_t id = data.id(t, k);
      const float value = data.topk_weights[static_cast<size_t>(t * data.spec.options.top_k + k)];
      if (id >= range.first && id < range.first + range.count && !(std::fabs(value) < kInfinity))
        ++count;
    }
    const bool has_weight =
        data.spec.options.shared_intermediate_size > 0 && !data.shared_weights.empty();
    if (has_weight && !(std::fabs(data.shared_weights[static_cast<size_t>(t)]) < kInfinity))
      ++count;
  }
  return count;
}

uint64_t nonfinite_elements(const std::vector<uint8_t>& out, DType dtype) {
  uint64_t count = 0;
  for (const float value : test::to_floats(out, dtype)) count += !(std::fabs(value) < kInfinity);
  return count;
}

class NonfiniteCounts : public test::BackendTest {
 protected:
  struct Output {
    std::vector<uint8_t> bytes;
    RunStatus status;
  };
  // elements: out's offset, in elements, from an aligned address.
  static Output run(test::CaseRun& layer, const CaseData& data, int64_t elements = 0) {
    const auto offset = static_cast<size_t>(elements * bits(data.spec.out_dtype) / 8);
    std::vector<uint8_t> out(data.out_bytes() + offset, uint8_t{0xFF});
    uint8_t* const start = out.data() + offset;
    Batch placed = layer.place(data.batch(start));
    if (layer.backend().memory != nullptr) placed.out = static_cast<uint8_t*>(placed.out) + offset;
    EXPECT_OK(layer.run_into(placed, serial_executor()));
    layer.fetch(placed, start);
    EXPECT_EQ(layer.broken_guard(), -1);
    return {{out.begin() + static_cast<std::ptrdiff_t>(offset), out.end()},
            *layer.buffers().status};
  }
  // Compares both counts of a run with the contents of its arrays.
  Output expect_counts(test::CaseRun& layer, const CaseData& data, int64_t elements = 0) {
    Output output = run(layer, data, elements);
    EXPECT_EQ(output.status.nonfinite_weights, nonfinite_weights(data));
    EXPECT_EQ(output.status.nonfinite_outputs,
              nonfinite_elements(output.bytes, data.spec.out_dtype));
    return output;
  }
};

// Each assignment's weight by itself: no place is left out or counted twice, beyond those that are
// read at once too.
TEST_P(NonfiniteCounts, EveryPlaceCountsOnce) {
  for (const int64_t top_k : {1, 7, 8, 9, 16, 32})
    for (const RouterWeight mode : {RouterWeight::kAfterDown, RouterWeight::kBeforeDown}) {
      auto data = make_case(spec_of(mode, top_k, 3, DType::kF32));
      ASSERT_OK(data);
      for (int64_t t = 0; t < 3; ++t)
        for (int64_t k = 0; k < top_k; ++k) data->set_id(t, k, 8 + k % 16);
      test::CaseRun layer(backend(), *data);
      ASSERT_TRUE(layer.ok());
      for (int64_t k = 0; k < top_k; ++k) {
        SCOPED_TRACE(std::string(to_string(mode)) + " " + std::to_string(k) + " of " +
                     std::to_string(top_k));
        CaseData spoilt = *data;
        weight(spoilt, 1, k) = kBad[k % 4];
        const Output output = expect_counts(layer, spoilt);
        EXPECT_EQ(output.status.nonfinite_weights, 1u);
        EXPECT_EQ(output.status.nonfinite_outputs, 80u);
        EXPECT_EQ(output.status.nonfinite_tokens, 0u);
      }
    }
}

// Non-finite numbers anywhere, under every router_weight, in batches of one to thousands. Ids of
// other ranks, -1 and ids of no expert have no row here, and their weights do not count. The next
// run with clean inputs counts nothing, and neither does a run of no tokens.
TEST_P(NonfiniteCounts, RandomPlaces) {
  Random random(20);
  uint64_t all_weights = 0, all_outputs = 0;
  for (int round = 0; round < 60; ++round) {
    constexpr RouterWeight kModes[] = {RouterWeight::kAfterDown, RouterWeight::kBeforeDown,
                                       RouterWeight::kOnInput};
    constexpr int64_t kTokens[] = {1, 2, 17, 64, 65, 150}, kTopK[] = {1, 2, 5, 12};
    const RouterWeight mode = one_of(random, kModes);
    const int64_t tokens = round == 0 ? 2100 : one_of(random, kTokens);
    const int64_t top_k = mode == RouterWeight::kOnInput || round == 0 ? 1 : one_of(random, kTopK);
    Case spec = spec_of(mode, top_k, tokens, one_of(random, kDTypes));
    spec.options.activation_format = one_of(random, test::kActivationFormats);
    spec.options.row_format = random.below(2) == 0 ? RowFormat::kFp32 : RowFormat::kBf16;
    if (random.below(2) == 0) spec.options.shared_intermediate_size = 32;
    spec.shared_weights = spec.options.shared_intermediate_size > 0 && random.below(2) == 0;
    spec.hidden_dtype = one_of(random, kDTypes);
    spec.routing = random.below(2) == 0 ? Routing::kBadIds : Routing::kPartlyNone;
    spec.data = random.below(4) == 0 ? DataKind::kNan : DataKind::kNormal;
    spec.seed = static_cast<uint64_t>(round) + 1;
    SCOPED_TRACE("round " + std::to_string(round) + ": " + to_string(mode) + " top_k " +
                 std::to_string(top_k) + ", " + std::to_string(tokens) + " tokens, " +
                 to_string(spec.out_dtype));
    const auto made = make_case(spec);
    ASSERT_OK(made);
    if (test::declines(backend(), made->config)) continue;
    CaseData data = *made;
    const int64_t every = 1 + random.below(40);
    if (random.below(3) == 0)  // finite sums that become Inf as fp16 stores them
      for (float& value : data.topk_weights) value *= 60000.0f;
    for (std::vector<float>* weights : {&data.topk_weights, &data.shared_weights})
      for (float& value : *weights)
        if (random.below(every) == 0) value = one_of(random, kBad);
    test::CaseRun layer(backend(), data), reference(kReferenceBackend, data);
    ASSERT_TRUE(layer.ok() && reference.ok());
    const RunStatus counts = expect_counts(layer, data, random.below(2)).status;
    if (tokens <= 64) {
      const RunStatus expected = run(reference, data).status;
      EXPECT_EQ(counts.nonfinite_weights, expected.nonfinite_weights);
      EXPECT_EQ(counts.nonfinite_outputs, expected.nonfinite_outputs);
    }
    all_weights += counts.nonfinite_weights;
    all_outputs += counts.nonfinite_outputs;

    for (const bool empty : {false, true}) {
      Case clean = spec;
      clean.data = DataKind::kNormal;
      if (empty) clean.tokens = 0;
      if (empty) layer.poison();  // the counts with it
      const RunStatus after = expect_counts(layer, *make_case(clean)).status;
      EXPECT_EQ(after.nonfinite_weights + after.nonfinite_outputs, 0u);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(all_weights, 100u);
  EXPECT_GT(all_outputs, 1000u);
}

// A product of hidden and its weight that is not finite makes its token nonfinite, as hidden does.
// A weight that is never multiplied is ignored.
class OnInput : public NonfiniteCounts {};

TEST_P(OnInput, AWeightThatIsNotFiniteSpoilsItsToken) {
  for (const ActivationFormat format : test::kActivationFormats)
    for (const DType dtype : kDTypes)
      for (const int64_t shared_size : {0, 96}) {
        SCOPED_TRACE(std::string(to_string(format)) + " " + to_string(dtype));
        Case spec = spec_of(RouterWeight::kOnInput, 1, 40, DType::kBf16);
        spec.options.activation_format = format;
        spec.options.shared_intermediate_size = shared_size;
        spec.hidden_dtype = dtype;
        spec.routing = Routing::kPartlyNone;
        const auto data = make_case(spec);
        ASSERT_OK(data);
        if (test::declines(backend(), data->config)) continue;
        test::CaseRun layer(backend(), *data);
        ASSERT_TRUE(layer.ok());
        const std::vector<float> clean = test::to_floats(run(layer, *data).bytes, DType::kBf16);

        CaseData spoilt = *data;
        std::vector<bool> nan(static_cast<size_t>(spec.tokens));
        for (int64_t t = 0; t < spec.tokens; t += 2) {
          weight(spoilt, t, 0) = kBad[t / 2 % 4];
          nan[static_cast<size_t>(t)] = spec.range.local(data->id(t, 0)).has_value();
        }
        // NaN in hidden too: the token counts once, or if only the shared expert reads it.
        std::memset(spoilt.hidden.data(), 0xFF, static_cast<size_t>(bits(dtype)) / 8);
        if (shared_size > 0) nan[0] = true;
        const Output out = run(layer, spoilt);
        const std::vector<float> values = test::to_floats(out.bytes, DType::kBf16);
        EXPECT_EQ(out.status.nonfinite_tokens,
                  static_cast<uint64_t>(std::count(nan.begin(), nan.end(), true)));
        EXPECT_GT(out.status.nonfinite_tokens, 0u);
        for (size_t i = 0; i < values.size(); ++i)
          ASSERT_TRUE(nan[i / 80] ? std::isnan(values[i]) : values[i] == clean[i]) << i;
      }
}

INSTANTIATE_TEST_SUITE_P(Backends, NonfiniteCounts, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);
INSTANTIATE_TEST_SUITE_P(Backends, OnInput, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
