// Experts with biases (gpt-oss) and without a gate (Nemotron-3) on a GPU, beyond the case table.

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "backend/cuda/plain/config.h"
#include "backend/sm100/config.h"
#include "backend/sm120/config.h"
#include "backend/sm90/config.h"
#include "cases/cases.h"
#include "core/float_formats.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/ragged.h"
#include "support/spec_oracle.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

class ExpertKinds : public BackendTest {
 protected:
  int configs(ActivationFormat format) const {
    constexpr int kPlain = static_cast<int>(cuda::plain::kConfigs.size());
    const bool bf16 = format == ActivationFormat::kBf16;
    if (&backend() == &kSm90Backend) return static_cast<int>(sm90::kBf16Configs);
    if (&backend() == &kSm100Backend)
      return static_cast<int>(bf16 ? sm100::kBf16GemmConfigs.size() : sm100::kGemmConfigs.size());
    if (&backend() == &kSm120Backend)
      return bf16 ? kPlain : static_cast<int>(sm120::kGemmConfigs.size());
    return kPlain;
  }
  static Case spec_of(Activation activation, bool biases, ActivationFormat format, int64_t tokens) {
    Case spec = ragged_case({4, 2, tokens, Routing::kUniform}, format);
    spec.options.activation = activation;
    if (activation == Activation::kSwigluOai) spec.options.swiglu_limit = 7.0f;
    spec.options.expert_biases = biases;
    return spec;
  }
  // A layer with only zero products, so that g, u and gemm2's rows are just the biases.
  static CaseData biases_alone(Activation activation, ActivationFormat format, int64_t hidden,
                               int64_t intermediate, int64_t tokens) {
    Case spec = spec_of(activation, true, format, tokens);
    spec.options.hidden_size = hidden;
    spec.options.intermediate_size = intermediate;
    CaseData data = *make_case(spec);
    std::fill(data.hidden.begin(), data.hidden.end(), uint8_t{0});
    for (size_t e = 0; e < data.experts.size(); ++e) {
      ExpertBuffers& expert = data.experts[e];
      std::fill(expert.down.codes.begin(), expert.down.codes.end(), uint8_t{0});
      // All channels and all experts differ.
      for (std::vector<float>* bias : {&expert.gate_bias, &expert.up_bias, &expert.down_bias})
        for (size_t i = 0; i < bias->size(); ++i)
          (*bias)[i] += static_cast<float>(i % 97 + 1 + 100 * e) / 256;
    }
    return data;
  }
  static void expect_biases_alone(const CaseData& data, const PartBuffers& part) {
    const int64_t inner = data.spec.options.intermediate_size,
                  hidden = data.spec.options.hidden_size;
    int64_t rows = 0;
    for (int64_t e = 0; e < part.experts; ++e) {
      const ExpertBuffers& expert = data.experts[static_cast<size_t>(e)];
      for (int64_t row = part.row_offsets[e]; row < part.row_offsets[e + 1]; ++row, ++rows) {
        for (int64_t n = 0; n < inner; ++n) {
          const auto i = static_cast<size_t>(n);
          const Real gate = expert.gate_bias.empty() ? 0 : Real{expert.gate_bias[i]};
          const auto expected = static_cast<double>(
              oracle_activation(data.spec.options, gate, Real{expert.up_bias[i]}));
          // One rounding to bf16; and that of the argument of e^x, below 2^7, with what is around
          // it.
          const double bound =
              oracle_half_ulp(expected, DType::kBf16) + 0x1p-16 * std::fabs(expected);
          ASSERT_NEAR(bf16_to_float(part.intermediate.bf16[row * inner + n]), expected, bound)
              << "expert " << e << " channel " << n << " of gemm1";
        }
        for (int64_t n = 0; n < hidden; ++n)
          ASSERT_EQ(static_cast<const float*>(part.rows_out)[row * hidden + n],
                    expert.down_bias[static_cast<size_t>(n)])
              << "expert " << e << " channel " << n << " of gemm2";
      }
    }
    EXPECT_EQ(rows, data.spec.tokens * data.spec.options.top_k);
  }
};

// In each of the two shapes one GEMM has a K long enough for split tiles, and no dimension is a
// multiple of a tile.
TEST_P(ExpertKinds, BiasesStandAloneWhereProductsAreZero) {
  for (const Activation activation : {Activation::kSwigluOai, Activation::kRelu2})
    for (const ActivationFormat format : {ActivationFormat::kBf16, ActivationFormat::kNvfp4})
      for (const auto& [hidden, intermediate] : {std::pair{1808, 80}, std::pair{144, 1808}}) {
        const CaseData data = biases_alone(activation, format, hidden, intermediate, 11);
        for (int config = 0; config < configs(format); ++config) {
          SCOPED_TRACE(testing::Message() << to_string(activation) << " " << to_string(format)
                                          << " hidden " << hidden << " configuration " << config);
          CaseRun run(backend(), data, -1, config);
          ASSERT_TRUE(run.ok());
          run.run(data);
          expect_biases_alone(data, run.buffers().routed);
          EXPECT_EQ(run.broken_guard(), -1);
          if (HasFatalFailure()) return;
        }
      }
}

// Random layers of ragged shapes with split tiles, against the host.
TEST_P(ExpertKinds, AgreeWithTheHost) {
  for (const auto& [activation, biases] :
       {std::pair{Activation::kSwigluOai, true}, std::pair{Activation::kRelu2, false}})
    for (const ActivationFormat format : {ActivationFormat::kBf16, ActivationFormat::kNvfp4})
      for (const int64_t tokens : {1, 14, 110}) {
        SCOPED_TRACE(testing::Message() << to_string(activation) << " " << to_string(format) << " "
                                        << tokens << " tokens");
        Case spec = spec_of(activation, biases, format, tokens);
        spec.options.shared_intermediate_size = 96;  // it has no biases
        spec.data = DataKind::kNan;
        const auto data = must(make_case(spec));
        CaseRun own(backend(), *data), parts(backend(), *data), host(kCpuBackend, *data);
        ASSERT_TRUE(own.ok() && parts.ok() && host.ok());
        const std::vector<uint8_t> bytes = run_against_steps(own, parts, *data);
        EXPECT_EQ(own.run(*data), bytes) << "a repeat differs";
        EXPECT_EQ(own.broken_guard(), -1);
        EXPECT_EQ(beyond_limits(*data, host.run(*data), bytes), "");
      }
}

TEST_P(ExpertKinds, BiasesAreReplacedWithTheirExpertAndComeBack) {
  const auto data = must(make_case(cases_named("w4a16_biases_oai/e8").front()));
  CaseData other = *data;
  for (ExpertBuffers& expert : other.experts)
    for (std::vector<float>* bias : {&expert.gate_bias, &expert.up_bias, &expert.down_bias})
      for (float& value : *bias) value += 0.5f;
  CaseRun run(backend(), *data), fresh(backend(), other);
  ASSERT_TRUE(run.ok() && fresh.ok());
  EXPECT_NE(run.run(*data), fresh.run(other));
  for (int64_t e = 0; e < data->spec.range.count; ++e) {
    ASSERT_OK(backend().pack_expert(run.weights(), e, other.expert(e)));
    ExpertBuffers out;
    ASSERT_OK(backend().unpack_expert(run.weights(), e, out));
    EXPECT_EQ(out.gate_bias, other.experts[static_cast<size_t>(e)].gate_bias);
    EXPECT_EQ(out.up_bias, other.experts[static_cast<size_t>(e)].up_bias);
    EXPECT_EQ(out.down_bias, other.experts[static_cast<size_t>(e)].down_bias);
  }
  EXPECT_EQ(run.run(*data), fresh.run(other));
}

INSTANTIATE_TEST_SUITE_P(Backends, ExpertKinds, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
