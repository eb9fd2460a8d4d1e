// The sums of exact layers (moe/exact_layer.h): the reference computes what this file sums in
// double, and no order of adding the products can round.
#include "moe/exact_layer.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/float_formats.h"
#include "support/case_run.h"
#include "support/exact_case.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// A sum of products, and the number of steps that its terms span: the sum of their magnitudes in
// units of the smallest power of two that divides all of them.
class Sum {
 public:
  void add(double term) {
    if (term == 0) return;
    total_ += term;
    magnitude_ += std::fabs(term);
    const auto bits = std::bit_cast<uint64_t>(term);
    const auto exponent = static_cast<int>(bits >> 52 & 0x7FF) - 1075;
    least_ = std::min(least_, exponent + std::min(52, std::countr_zero(bits)));
  }
  double total() const { return total_; }
  double steps() const { return magnitude_ == 0 ? 0 : std::ldexp(magnitude_, -least_); }

 private:
  double total_ = 0, magnitude_ = 0;
  int least_ = 1 << 20;
};

// (rows, cols) of an NVFP4 matrix, without its tensor scale.
std::vector<double> values_of(const Nvfp4View& matrix) {
  std::vector<double> values;
  for (int64_t r = 0; r < matrix.rows; ++r)
    for (int64_t c = 0; c < matrix.cols; ++c) {
      const uint8_t pair = matrix.row_codes(r)[c / 2];
      values.push_back(double{e2m1_to_float(c % 2 == 0 ? pair & 15 : pair >> 4)} *
                       double{e4m3_to_float(matrix.row_scales(r)[c / 16])});
    }
  return values;
}
// A row of activations as the GEMM multiplies it, without its row scale.
std::vector<double> values_of(const ActivationBuffers& x, ActivationFormat format, int64_t row,
                              int64_t k) {
  const auto at = [row, k](const auto* values, int64_t c) { return values[row * k + c]; };
  std::vector<double> values;
  for (int64_t c = 0; c < k; ++c) {
    if (format == ActivationFormat::kNvfp4) {
      const uint8_t pair = x.codes[row * (k / 2) + c / 2];
      values.push_back(double{e2m1_to_float(c % 2 == 0 ? pair & 15 : pair >> 4)} *
                       double{e4m3_to_float(x.block_scales[row * (k / 16) + c / 16])});
    } else {
      values.push_back(format == ActivationFormat::kBf16 ? double{bf16_to_float(at(x.bf16, c))}
                                                         : double{e4m3_to_float(at(x.fp8, c))});
    }
  }
  return values;
}

// The activation in double. The functions of swiglu and gelu have a gate of at least 36, which
// their factor does not change.
double activation(const MoeOptions& options, double gate, double up) {
  const double limit = options.swiglu_limit.value_or(0.0f);
  const auto within = [limit](double x) { return std::min(std::max(x, -limit), limit); };
  switch (options.activation) {
    case Activation::kSwigluClamped:
    case Activation::kSwigluStep: return std::min(gate, limit) * within(up);
    case Activation::kSwigluOai: return std::min(gate, limit) * (within(up) + 1);
    case Activation::kRelu2: return up > 0 ? up * up : 0;
    case Activation::kSitu: {
      const double b = *options.situ_gate_limit, l = *options.situ_up_limit;
      return b * std::tanh(gate / b) / (1 + std::exp(-gate)) * l * std::tanh(up / l);
    }
    default: return gate * up;
  }
}

class ExactLayer : public testing::TestWithParam<ActivationFormat> {};

// The layers of the self-check, in every activation.
TEST_P(ExactLayer, NoSumRounds) {
  const ActivationFormat format = GetParam();
  // FP8 tensor cores of Hopper add with 13 bits
  const double most_steps = format == ActivationFormat::kFp8 ? 0x1p13 : 0x1p24;
  for (const auto& [hidden, inner] : {std::pair{1936, 80}, std::pair{144, 1936}})
    for (size_t i = 0; i < EnumNames<Activation>::kAll.size(); ++i) {
      const auto function = static_cast<Activation>(i);
      SCOPED_TRACE(testing::Message() << to_string(function) << " " << hidden << " x " << inner);
      const CaseData data = exact_case({4, 2, hidden, inner}, format, 2, false, function);
      CaseRun reference(kReferenceBackend, data);
      ASSERT_TRUE(reference.ok());
      reference.run_steps(data);
      const PartBuffers& part = reference.buffers().routed;
      const bool scaled = part.hidden.row_scale != nullptr;
      double most = 0;
      std::set<float> outputs;
      for (int64_t e = 0; e < 4; ++e) {
        const ExpertSource source = data.expert(e);
        const std::vector<double> gate = values_of(source.gate), up = values_of(source.up),
                                  down = values_of(source.down);
        for (int64_t row = part.row_offsets[e]; row < part.row_offsets[e + 1]; ++row) {
          const int64_t token = part.assignment_of_row[row] / 2;
          const double x_scale = scaled ? double{part.hidden.row_scale[token]} : 1,
                       h_scale = scaled ? double{part.intermediate.row_scale[row]} : 1;
          const std::vector<double> x = values_of(part.hidden, format, token, hidden),
                                    h = values_of(part.intermediate, format, row, inner);
          const auto sum_of = [&most](const std::vector<double>& weights, int64_t channel,
                                      const std::vector<double>& values) {
            Sum sum;
            if (!weights.empty())
              for (size_t k = 0; k < values.size(); ++k)
                sum.add(weights[static_cast<size_t>(channel) * values.size() + k] * values[k]);
            most = std::max(most, sum.steps());
            return sum.total();
          };
          for (int64_t channel = 0; channel < inner; ++channel) {
            const double g = sum_of(gate, channel, x) * x_scale * double{source.gate.tensor_scale},
                         u = sum_of(up, channel, x) * x_scale * double{source.up.tensor_scale};
            if (has_gate(function)) {
              ASSERT_GE(g, 36);
            }
            ASSERT_EQ(part.intermediate.bf16[row * inner + channel],
                      bf16_from_double(activation(data.config.options(), g, u)))
                << "row " << row << " channel " << channel << ", gate " << g << ", up " << u;
          }
          for (int64_t channel = 0; channel < hidden; ++channel) {
            const double y = sum_of(down, channel, h) * h_scale * double{source.down.tensor_scale};
            const float got = static_cast<const float*>(part.rows_out)[row * hidden + channel];
            ASSERT_EQ(double{got}, y) << "row " << row << " channel " << channel;
            outputs.insert(got);
          }
        }
      }
      EXPECT_LT(most, most_steps);
      EXPECT_GT(outputs.size(), 100u);
    }
}

INSTANTIATE_TEST_SUITE_P(Formats, ExactLayer,
                         testing::Values(ActivationFormat::kNvfp4, ActivationFormat::kBf16,
                                         ActivationFormat::kFp8),
                         [](const auto& of) { return to_string(of.param); });

// A full batch gives each expert its rows, and no token an expert twice.
TEST(ExactBatches, ExpertsHaveTheirRows) {
  for (const std::vector<int64_t>& rows : {std::vector<int64_t>{192, 193, 97, 1},
                                           {1, 1, 1, 1},
                                           {5, 0, 0, 0},
                                           {1050, 1050, 1050, 1050}}) {
    const std::vector<int32_t> ids = ids_of_rows(rows, 2);
    std::map<int32_t, int64_t> counts;
    for (size_t i = 0; i < ids.size(); i += 2) {
      EXPECT_TRUE(ids[i] != ids[i + 1] || ids[i] < 0);
      ++counts[ids[i]], ++counts[ids[i + 1]];
    }
    for (size_t e = 0; e < rows.size(); ++e) EXPECT_EQ(counts[static_cast<int32_t>(e)], rows[e]);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
