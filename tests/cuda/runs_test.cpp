// Runs on a GPU beyond the case table: layers of ragged shapes whose tiles are split, with biases
// (gpt-oss), without a gate (Nemotron-3), and with router weights on input. A run has the bits and
// counts of its steps and agrees with the host's layer. tests/layer defines on_input.

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cases/cases.h"
#include "cuda/configurations.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/ragged.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr Activation kGeluAndSitu[] = {Activation::kGelu, Activation::kGeluTanh, Activation::kSitu};
constexpr ActivationFormat kNvfp4 = ActivationFormat::kNvfp4, kBf16 = ActivationFormat::kBf16;

class RunsOnADevice : public BackendTest {
 protected:
  static Case kind(Activation activation, bool biases, ActivationFormat format, int64_t tokens) {
    Case spec = ragged_case({4, 2, tokens, Routing::kUniform}, format);
    spec.options.activation = activation;
    if (activation == Activation::kSwigluOai) spec.options.swiglu_limit = 7.0f;
    if (activation == Activation::kSitu) set_situ(spec.options);
    spec.options.expert_biases = biases;
    spec.options.shared_intermediate_size = 96;  // it has no biases
    spec.data = DataKind::kNan;
    return spec;
  }
  static Case on_input(int64_t tokens, ActivationFormat format, int64_t shared_size, DType dtype) {
    Case spec = sized_case(8, 1, 528, 144, tokens);
    spec.options.shared_intermediate_size = shared_size;
    spec.options.activation_format = format;
    spec.options.router_weight = RouterWeight::kOnInput;
    spec.options.row_format = RowFormat::kFp32;
    spec.routing = Routing::kPartlyNone;
    spec.data = DataKind::kNan;
    spec.hidden_dtype = dtype;
    spec.out_dtype = DType::kF32;
    return spec;
  }
  // Returns the kernels of quantize and gemm1. config: Limits::gemm_config.
  std::string expect_right(const Case& spec, int config = -1) {
    const bool on_input = spec.options.router_weight == RouterWeight::kOnInput;
    SCOPED_TRACE(testing::Message()
                 << to_string(spec.options.activation) << " "
                 << to_string(spec.options.activation_format) << ", " << spec.tokens
                 << " tokens of " << to_string(spec.hidden_dtype) << ", shared "
                 << spec.options.shared_intermediate_size << ", configuration " << config);
    CaseData data = *must(make_case(spec));
    if (on_input)
      for (size_t t = 1; t < data.topk_weights.size(); t += 4) data.topk_weights[t] = NAN;
    CaseRun own(backend(), data, -1, config), parts(backend(), data, -1, config),
        host(kCpuBackend, data);
    EXPECT_TRUE(own.ok() && parts.ok() && host.ok());
    const std::vector<uint8_t> bytes = run_against_steps(own, parts, data);
    EXPECT_EQ(own.run(data), bytes) << "a repeat differs";
    EXPECT_EQ(own.broken_guard(), -1);
    EXPECT_EQ(beyond_limits(data, host.run(data), bytes), "");
    const RunStatus &counts = *own.buffers().status, &host_counts = *host.buffers().status;
    EXPECT_EQ(counts.nonfinite_tokens, host_counts.nonfinite_tokens);
    EXPECT_EQ(counts.hidden_blocks, host_counts.hidden_blocks);
    EXPECT_EQ(counts.hidden_saturated, host_counts.hidden_saturated);
    EXPECT_EQ(counts.hidden_zeroed, host_counts.hidden_zeroed);
    EXPECT_EQ(counts.nonfinite_weights, host_counts.nonfinite_weights);
    EXPECT_EQ(counts.nonfinite_outputs, host_counts.nonfinite_outputs);
    const auto steps = backend().describe_run(data.config, spec.range, own.plan(), spec.tokens);
    EXPECT_EQ(steps[1].kernel.rfind("hidden times the router weight", 0) == 0, on_input)
        << steps[1].kernel;
    return steps[1].kernel + " | " + steps[2].kernel;
  }
};

// Small enough for compute-sanitizer.
TEST_P(RunsOnADevice, AFewTokens) {
  for (const ActivationFormat format : {kNvfp4, kBf16})
    for (const int64_t shared_size : {0, 96})
      expect_right(on_input(5, format, shared_size, DType::kBf16));
}

TEST_P(RunsOnADevice, BiasesAndExpertsWithoutAGate) {
  for (const ActivationFormat format : {kBf16, kNvfp4})
    for (const bool biases : {true, false}) {
      const Activation activation = biases ? Activation::kSwigluOai : Activation::kRelu2;
      // up to eight tokens sm90's run under bf16 is one kernel (sm90_decode_test.cpp)
      for (const int64_t tokens : {format == kBf16 ? 9 : 1, 110})
        expect_right(kind(activation, biases, format, tokens));
      for (int config = 0; config < configurations_of(backend(), format); ++config)
        expect_right(kind(activation, true, format, 14), config);
      if (HasFailure()) return;
    }
}

// Beyond eight tokens sm90 has kernels of gemm1 for these functions in all of its formats.
TEST_P(RunsOnADevice, GeluAndSituOfAFewTokens) {
  for (const Activation activation : kGeluAndSitu)
    for (const ActivationFormat format : {kBf16, kNvfp4})
      expect_right(kind(activation, format == kBf16, format, 9));
}

TEST_P(RunsOnADevice, GeluAndSituInEveryConfiguration) {
  for (const Activation activation : kGeluAndSitu)
    for (const ActivationFormat format : {kBf16, kNvfp4, ActivationFormat::kFp8}) {
      // sm90's run of fewer tokens is one kernel under bf16 and fp8
      const int64_t few_tokens = format == kNvfp4 ? 1 : 9;
      for (const int64_t tokens : {few_tokens, int64_t{110}})
        expect_right(kind(activation, tokens == few_tokens, format, tokens));
      for (int config = 0; config < configurations_of(backend(), format); ++config)
        expect_right(kind(activation, true, format, 14), config);
      if (HasFailure()) return;
    }
}

TEST_P(RunsOnADevice, RouterWeightsOnInput) {
  bool into_rows = false;
  for (const int64_t tokens : {1, 2, 33, 300, 2200})
    for (const ActivationFormat format : {kNvfp4, kBf16})
      for (const int64_t shared_size : {0, 96}) {
        const auto kernels = expect_right(on_input(tokens, format, shared_size, DType::kBf16));
        into_rows |= shared_size > 0 && kernels.find("into expert order") != std::string::npos;
        if (HasFailure()) return;
      }
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    expect_right(on_input(33, kNvfp4, 96, dtype));
    expect_right(on_input(2200, kBf16, 96, dtype));
  }
  EXPECT_EQ(into_rows, &backend() == &kSm90Backend) << "rows by TMA next to a shared expert";
}

// K is not a multiple of a tile or a k-block, and is long enough that tiles are split. Under zipf
// the first experts are crowded; one rank holds some of the experts.
TEST_P(RunsOnADevice, EveryConfigurationAgreesWithThePlainKernels) {
  for (const ActivationFormat format : {kBf16, kNvfp4, ActivationFormat::kFp8})
    for (const auto& [ragged, local_experts] : {std::pair{Ragged{4, 2, 3, Routing::kUniform}, 4},
                                                {{64, 4, 60, Routing::kZipf}, 16},
                                                {{4, 2, 180, Routing::kZipf}, 4},
                                                {{4, 2, 300, Routing::kOneExpert}, 4}}) {
      Case spec = ragged_case(ragged, format);
      if (&backend() == &kSm100Backend) spec.options.hidden_size = 3088;
      spec.range.count = local_experts;
      const auto data = must(make_case(spec));
      if (declines(backend(), data->config)) continue;
      CaseRun plain(kCudaBackend, *data);
      const std::vector<uint8_t> expected = plain.run(*data);
      for (int config = 0; config < configurations_of(backend(), format); ++config) {
        SCOPED_TRACE(testing::Message() << to_string(format) << ", " << ragged.tokens
                                        << " tokens, configuration " << config);
        CaseRun own(backend(), *data, -1, config);
        ASSERT_TRUE(own.ok());
        const std::vector<uint8_t> bytes = own.run(*data);
        EXPECT_EQ(beyond_limits(*data, expected, bytes), "");
        EXPECT_EQ(own.broken_guard(), -1);
        for (int again = 0; again < 3; ++again)
          ASSERT_EQ(own.run(*data), bytes) << "a repeat differs";
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Backends, RunsOnADevice, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
