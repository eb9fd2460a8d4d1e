// router_weight on_input on a GPU: a run of any size equals its steps and the host's layer, with
// all kernels that quantize the two hiddens and copy the rows. The case table (tests/cases) has the
// small layers; tests/layer defines on_input.

#include <cmath>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/ragged.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

class OnInputOnADevice : public BackendTest {
 protected:
  // Returns the kernels of quantize and gemm1.
  std::string expect_run_is_its_steps(int64_t tokens, ActivationFormat format, int64_t shared_size,
                                      DType dtype) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens, " << to_string(format) << ", shared "
                                    << shared_size << ", " << to_string(dtype));
    Case spec = sized_case(8, 1, 528, 144, tokens);
    spec.options.shared_intermediate_size = shared_size;
    spec.options.activation_format = format;
    spec.options.router_weight = RouterWeight::kOnInput;
    spec.options.row_format = RowFormat::kFp32;
    spec.routing = Routing::kPartlyNone;
    spec.data = DataKind::kNan;
    spec.hidden_dtype = dtype;
    spec.out_dtype = DType::kF32;
    auto data = make_case(spec);
    EXPECT_OK(data);
    for (size_t t = 1; t < data->topk_weights.size(); t += 4) data->topk_weights[t] = std::nanf("");
    CaseRun own(backend(), *data), parts(backend(), *data), host(kCpuBackend, *data);
    EXPECT_TRUE(own.ok() && parts.ok() && host.ok());
    if (!own.ok() || !parts.ok() || !host.ok()) return "";
    const std::vector<uint8_t> bytes = run_against_steps(own, parts, *data);
    EXPECT_EQ(own.run(*data), bytes) << "a repeat differs";
    EXPECT_EQ(beyond_limits(*data, host.run(*data), bytes), "");
    const RunStatus &counts = *own.buffers().status, &host_counts = *host.buffers().status;
    EXPECT_EQ(counts.nonfinite_tokens, host_counts.nonfinite_tokens);
    EXPECT_EQ(counts.hidden_blocks, host_counts.hidden_blocks);
    EXPECT_EQ(counts.hidden_saturated, host_counts.hidden_saturated);
    EXPECT_EQ(counts.hidden_zeroed, host_counts.hidden_zeroed);
    EXPECT_EQ(counts.nonfinite_weights, host_counts.nonfinite_weights);
    EXPECT_EQ(counts.nonfinite_outputs, host_counts.nonfinite_outputs);
    const auto steps = backend().describe_run(data->config, spec.range, own.plan(), tokens);
    return steps[1].kernel + " | " + steps[2].kernel;
  }
};

TEST_P(OnInputOnADevice, ARunIsItsSteps) {
  bool into_rows = false;
  for (const int64_t tokens : {1, 2, 33, 300, 2200})
    for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kBf16})
      for (const int64_t shared_size : {0, 96}) {
        const std::string kernels =
            expect_run_is_its_steps(tokens, format, shared_size, DType::kBf16);
        EXPECT_NE(kernels.find("hidden times the router weight"), std::string::npos) << kernels;
        into_rows |= shared_size > 0 && kernels.find("into expert order") != std::string::npos;
        if (HasFailure()) return;
      }
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    expect_run_is_its_steps(33, ActivationFormat::kNvfp4, 96, dtype);
    expect_run_is_its_steps(2200, ActivationFormat::kBf16, 96, dtype);
  }
  EXPECT_EQ(into_rows, &backend() == &kSm90Backend) << "rows by TMA beside a shared expert";
}

// Small enough for compute-sanitizer.
TEST_P(OnInputOnADevice, AFewTokens) {
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kBf16})
    for (const int64_t shared_size : {0, 96})
      expect_run_is_its_steps(5, format, shared_size, DType::kBf16);
}

INSTANTIATE_TEST_SUITE_P(Backends, OnInputOnADevice, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
