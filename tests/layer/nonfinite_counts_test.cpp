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
    const bool weighed =
        data.spec.options.shared_intermediate_size > 0 && !data.shared_weights.empty();
    if (weighed && !(std::fabs(data.shared_weights[static_cast<size_t>(t)]) < kInfinity)) ++count;
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

// Finite inputs: the values of an fp32 run that are beyond fp16 overflow in fp16, and nothing else
// counts.
TEST_P(NonfiniteCounts, OverflowOfFp16IsCounted) {
  for (const int64_t tokens : {1, 70}) {
    Case spec = spec_of(RouterWeight::kAfterDown, 2, tokens, DType::kF32);
    spec.options.row_format = RowFormat::kFp32;
    auto data = make_case(spec);
    ASSERT_OK(data);
    for (int64_t t = 0; t < tokens; ++t)
      data->set_id(t, 0, 8 + t % 16), weight(*data, t, 0) = 60000.0f;
    test::CaseRun layer(backend(), *data);
    ASSERT_TRUE(layer.ok());
    const Output wide = expect_counts(layer, *data);
    EXPECT_EQ(wide.status.nonfinite_outputs, 0u);
    uint64_t beyond = 0;
    for (const float value : test::to_floats(wide.bytes, DType::kF32))
      beyond += std::fabs(value) >= 65520.0f;
    EXPECT_GT(beyond, 0u);
    EXPECT_LT(beyond, wide.bytes.size() / 4);
    data->spec.out_dtype = DType::kF16;
    for (const int64_t elements : {0, 1}) {
      const Output narrow = expect_counts(layer, *data, elements);
      EXPECT_EQ(narrow.status.nonfinite_outputs, beyond);
      EXPECT_EQ(narrow.status.nonfinite_tokens + narrow.status.nonfinite_weights +
                    narrow.status.nonfinite_rows,
                0u);
    }
  }
}

// One channel of each token is between bf16's largest number and fp32's: finite as fp32, and Inf as
// bf16 stores it.
TEST_P(NonfiniteCounts, OutputsCountAsTheyAreStored) {
  Case spec = spec_of(RouterWeight::kAfterDown, 1, 5, DType::kF32);
  spec.options.row_format = RowFormat::kFp32;
  auto data = make_case(spec);
  ASSERT_OK(data);
  for (int64_t t = 0; t < spec.tokens; ++t) data->set_id(t, 0, 8 + t), weight(*data, t, 0) = 1.0f;
  test::CaseRun layer(backend(), *data);
  ASSERT_TRUE(layer.ok());
  const std::vector<float> rows = test::to_floats(run(layer, *data).bytes, DType::kF32);
  for (int64_t t = 0; t < spec.tokens; ++t) {
    float largest = 0;
    for (int64_t c = 0; c < 80; ++c)
      largest = std::max(largest, std::fabs(rows[static_cast<size_t>(t * 80 + c)]));
    weight(*data, t, 0) = 3.4e38f / largest;
  }
  ASSERT_EQ(nonfinite_weights(*data), 0u);
  EXPECT_EQ(expect_counts(layer, *data).status.nonfinite_outputs, 0u);
  data->spec.out_dtype = DType::kBf16;
  for (const int64_t elements : {0, 1, 3})
    EXPECT_EQ(expect_counts(layer, *data, elements).status.nonfinite_outputs, 5u) << elements;
  // With larger weights the sum itself overflows, for every type of out.
  for (float& value : data->topk_weights)
    value = std::min(value * 2, std::numeric_limits<float>::max());
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    data->spec.out_dtype = dtype;
    EXPECT_GE(expect_counts(layer, *data).status.nonfinite_outputs, 5u) << to_string(dtype);
  }
}

TEST_P(NonfiniteCounts, ANanTokenGivesAllItsOutputs) {
  for (const ActivationFormat format : test::kActivationFormats)
    for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
      SCOPED_TRACE(std::string(to_string(format)) + " " + to_string(dtype));
      Case spec = spec_of(RouterWeight::kAfterDown, 2, 40, dtype);
      spec.options.activation_format = format;
      spec.data = DataKind::kNan;
      const auto data = make_case(spec);
      ASSERT_OK(data);
      if (test::declines(backend(), data->config)) continue;
      test::CaseRun layer(backend(), *data);
      ASSERT_TRUE(layer.ok());
      for (const int64_t elements : {0, 1}) {
        const Output output = expect_counts(layer, *data, elements);
        EXPECT_GT(output.status.nonfinite_tokens, 5u);
        EXPECT_EQ(output.status.nonfinite_outputs, 80 * output.status.nonfinite_tokens);
        EXPECT_EQ(output.status.nonfinite_weights, 0u);
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
    const RouterWeight mode =
        std::vector{RouterWeight::kAfterDown, RouterWeight::kBeforeDown,
                    RouterWeight::kOnInput}[static_cast<size_t>(random.below(3))];
    const int64_t tokens =
        round == 0
            ? 2100
            : std::vector<int64_t>{1, 2, 17, 64, 65, 150}[static_cast<size_t>(random.below(6))];
    const bool one = mode == RouterWeight::kOnInput || round == 0;
    const int64_t top_k =
        one ? 1 : std::vector<int64_t>{1, 2, 5, 12}[static_cast<size_t>(random.below(4))];
    const DType dtypes[] = {DType::kBf16, DType::kF16, DType::kF32};
    Case spec = spec_of(mode, top_k, tokens, dtypes[static_cast<size_t>(random.below(3))]);
    spec.options.activation_format =
        random.below(2) == 0 ? ActivationFormat::kNvfp4 : ActivationFormat::kBf16;
    spec.options.row_format = random.below(2) == 0 ? RowFormat::kFp32 : RowFormat::kBf16;
    if (random.below(2) == 0) spec.options.shared_intermediate_size = 32;
    spec.shared_weights = spec.options.shared_intermediate_size > 0 && random.below(2) == 0;
    spec.hidden_dtype = dtypes[static_cast<size_t>(random.below(3))];
    spec.routing = random.below(2) == 0 ? Routing::kBadIds : Routing::kPartlyNone;
    spec.data = random.below(4) == 0 ? DataKind::kNan : DataKind::kNormal;
    spec.seed = static_cast<uint64_t>(round) + 1;
    SCOPED_TRACE("round " + std::to_string(round) + ": " + to_string(mode) + " top_k " +
                 std::to_string(top_k) + ", " + std::to_string(tokens) + " tokens, " +
                 to_string(spec.out_dtype));
    const auto made = make_case(spec);
    ASSERT_OK(made);
    CaseData data = *made;
    const int64_t every = 1 + random.below(40);
    for (float& value : data.topk_weights)
      if (random.below(every) == 0) value = kBad[static_cast<size_t>(random.below(4))];
    for (float& value : data.shared_weights)
      if (random.below(every) == 0) value = kBad[static_cast<size_t>(random.below(4))];
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

    Case clean_spec = spec;
    clean_spec.data = DataKind::kNormal;
    const auto clean = make_case(clean_spec);
    ASSERT_OK(clean);
    const RunStatus after = expect_counts(layer, *clean).status;
    EXPECT_EQ(after.nonfinite_weights + after.nonfinite_outputs, 0u);
    layer.poison();  // the counts with it
    Case none_spec = spec;
    none_spec.tokens = 0;
    const auto none = make_case(none_spec);
    ASSERT_OK(none);
    const RunStatus empty = expect_counts(layer, *none).status;
    EXPECT_EQ(empty.nonfinite_weights + empty.nonfinite_outputs, 0u);
    if (HasFailure()) return;
  }
  EXPECT_GT(all_weights, 100u);
  EXPECT_GT(all_outputs, 1000u);
}

INSTANTIATE_TEST_SUITE_P(Backends, NonfiniteCounts, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
