// Counts of non-finite weights and outputs on a GPU. Rows are so wide that several CTAs share a
// token or one CTA loops over it, and the last part leaves threads without a channel. tests/layer
// defines the counts.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "core/random.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

class NonfiniteCountsOnADevice : public BackendTest {
 protected:
  static Case spec_of(int64_t tokens, int64_t hidden, int64_t top_k, RouterWeight mode, DType out,
                      RowFormat rows) {
    Case spec;
    set_sizes(spec.options, 16, top_k, hidden, 16);
    spec.options.shared_intermediate_size = 16;
    spec.options.router_weight = mode;
    if (mode == RouterWeight::kBeforeDown) spec.options.max_router_weight = 2.0f;
    spec.options.row_format = rows;
    spec.range = {4, 8};
    spec.tokens = tokens;
    spec.routing = Routing::kPartlyNone;
    spec.data = DataKind::kNan;
    spec.out_dtype = out;
    spec.shared_weights = true;
    return spec;
  }
  // elements: out's offset, in elements, from an aligned address.
  static std::vector<uint8_t> run(CaseRun& layer, const CaseData& data, int64_t elements) {
    std::vector<uint8_t> out(data.out_bytes(), uint8_t{0xFF});
    Batch placed = layer.place(data.batch(out.data()));
    placed.out = static_cast<uint8_t*>(placed.out) + elements * bits(data.spec.out_dtype) / 8;
    EXPECT_OK(layer.run_into(placed, serial_executor()));
    layer.fetch(placed, out.data());
    EXPECT_EQ(layer.broken_guard(), -1);
    return out;
  }
  // A run, its steps and the host's layer: both counts of all three.
  void expect_counts(const Case& spec, int64_t elements) {
    SCOPED_TRACE(testing::Message()
                 << spec.tokens << " tokens of " << spec.options.hidden_size << ", top_k "
                 << spec.options.top_k << ", " << to_string(spec.options.router_weight) << ", out "
                 << to_string(spec.out_dtype) << " + " << elements);
    CaseData data = *must(make_case(spec));
    Random random(spec.seed + 7);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (std::vector<float>* weights : {&data.topk_weights, &data.shared_weights})
      for (float& value : *weights)
        if (random.below(30) == 0) value = bad[random.below(3)];
    data.shared_weights.back() = NAN;
    CaseRun whole(backend(), data), parts(backend(), data), host(kCpuBackend, data);
    ASSERT_TRUE(whole.ok() && parts.ok() && host.ok());
    const std::vector<uint8_t> out = run(whole, data, elements);
    uint64_t outputs = 0;
    for (const float value : to_floats(out, spec.out_dtype)) outputs += !std::isfinite(value);
    const RunStatus& counts = *whole.buffers().status;
    EXPECT_EQ(counts.nonfinite_outputs, outputs);
    EXPECT_GT(outputs, 0u);
    EXPECT_GT(counts.nonfinite_weights, 0u);
    EXPECT_EQ(difference(parts.run_steps(data), out, spec.out_dtype, spec.options.hidden_size), "");
    EXPECT_EQ(std::memcmp(&counts, parts.buffers().status, sizeof(RunStatus)), 0);
    host.run(data);
    EXPECT_EQ(counts.nonfinite_weights, host.buffers().status->nonfinite_weights);
    EXPECT_EQ(counts.nonfinite_outputs, host.buffers().status->nonfinite_outputs);

    // A clean case in the same memory counts nothing.
    Case next = spec;
    next.data = DataKind::kNormal;
    run(whole, *make_case(next), elements);
    EXPECT_EQ(counts.nonfinite_weights + counts.nonfinite_outputs, 0u);
  }
};

TEST_P(NonfiniteCountsOnADevice, WideRows) {
  for (const int64_t tokens : {1, 5, 64, 65, 300})
    for (const int64_t hidden : {512, 528, 2064, 5136}) {
      const int64_t top_k = hidden % 32 == 0 ? 3 : 12;
      const RowFormat rows = tokens % 2 == 0 ? RowFormat::kFp32 : RowFormat::kBf16;
      for (const DType out : {DType::kBf16, DType::kF16, DType::kF32}) {
        expect_counts(spec_of(tokens, hidden, top_k, RouterWeight::kAfterDown, out, rows), 0);
        expect_counts(spec_of(tokens, hidden, top_k, RouterWeight::kBeforeDown, out, rows), 1);
      }
    }
}

// With this many tokens a CTA goes through all channels of a token.
TEST_P(NonfiniteCountsOnADevice, ThousandsOfTokens) {
  for (const DType out : {DType::kBf16, DType::kF16, DType::kF32})
    for (const RowFormat rows : {RowFormat::kFp32, RowFormat::kBf16}) {
      expect_counts(spec_of(2100, 1040, 2, RouterWeight::kAfterDown, out, rows), 0);
      expect_counts(spec_of(2100, 1040, 1, RouterWeight::kOnInput, out, rows), 1);
      if (HasFailure()) return;
    }
}

// Small enough for compute-sanitizer.
TEST_P(NonfiniteCountsOnADevice, AFewTokens) {
  expect_counts(spec_of(3, 528, 12, RouterWeight::kAfterDown, DType::kBf16, RowFormat::kFp32), 1);
  expect_counts(spec_of(70, 80, 2, RouterWeight::kBeforeDown, DType::kF16, RowFormat::kBf16), 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, NonfiniteCountsOnADevice, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
