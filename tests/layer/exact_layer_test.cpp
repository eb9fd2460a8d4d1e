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
#include "moe/self_check_session.h"
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

// The value of a GEMM's product for one part of a layer, in double.
class PartSums {
 public:
  // most: set to the most steps of any sum.
  PartSums(const CaseData& data, const PartBuffers& part, bool shared, double& most)
      : options_(data.config.options()), data_(data), part_(part), shared_(shared), most_(most) {}

  // Compares each row of an expert.
  void expect_exact(int64_t expert, std::set<float>& outputs) {
    const ExpertSource source = data_.expert(shared_ ? kSharedExpert : expert);
    const std::vector<double> gate = values_of(source.gate), up = values_of(source.up),
                              down = values_of(source.down);
    const ExpertBiases& biases = source.biases;
    const int64_t hidden = options_.hidden_size, inner = part_.intermediate_size;
    for (int64_t row = part_.row_offsets[expert]; row < part_.row_offsets[expert + 1]; ++row) {
      const int64_t assignment = shared_ ? row * 2 : part_.assignment_of_row[row];
      const double weight = options_.router_weight == RouterWeight::kBeforeDown && !shared_
                                ? double{data_.topk_weights[static_cast<size_t>(assignment)]}
                                : 1;
      const std::vector<double> x = values_of(part_.hidden, format(), assignment / 2, hidden),
                                h = values_of(part_.intermediate, format(), row, inner);
      const double x_scale = scale_of(part_.hidden, assignment / 2),
                   h_scale = scale_of(part_.intermediate, row);
      for (int64_t channel = 0; channel < inner; ++channel) {
        const double g = sum_of(gate, channel, x) * x_scale * double{source.gate.tensor_scale} +
                         bias_of(biases.gate, channel),
                     u = sum_of(up, channel, x) * x_scale * double{source.up.tensor_scale} +
                         bias_of(biases.up, channel);
        if (has_gate(options_.activation)) {
          ASSERT_GE(g, 36);
        }
        ASSERT_EQ(part_.intermediate.bf16[row * inner + channel],
                  bf16_from_double(activation(options_, g, u) * weight))
            << "row " << row << " channel " << channel << ", gate " << g << ", up " << u;
      }
      for (int64_t channel = 0; channel < hidden; ++channel) {
        const double y = sum_of(down, channel, h) * h_scale * double{source.down.tensor_scale} +
                         bias_of(biases.down, channel);
        const int64_t at = row * hidden + channel;
        const bool fp32 = options_.row_format == RowFormat::kFp32;
        const float got = fp32 ? static_cast<const float*>(part_.rows_out)[at]
                               : bf16_to_float(static_cast<const uint16_t*>(part_.rows_out)[at]);
        ASSERT_EQ(double{got}, fp32 ? y : double{bf16_to_float(bf16_from_double(y))})
            << "row " << row << " channel " << channel;
        outputs.insert(got);
      }
    }
  }

 private:
  ActivationFormat format() const { return options_.activation_format; }
  static double scale_of(const ActivationBuffers& x, int64_t row) {
    return x.row_scale == nullptr ? 1 : double{x.row_scale[row]};
  }
  static double bias_of(const float* biases, int64_t channel) {
    return biases == nullptr ? 0 : double{biases[channel]};
  }
  double sum_of(const std::vector<double>& weights, int64_t channel,
                const std::vector<double>& values) {
    Sum sum;
    if (!weights.empty())
      for (size_t k = 0; k < values.size(); ++k)
        sum.add(weights[static_cast<size_t>(channel) * values.size() + k] * values[k]);
    most_ = std::max(most_, sum.steps());
    return sum.total();
  }

  const MoeOptions& options_;
  const CaseData& data_;
  const PartBuffers& part_;
  const bool shared_;
  double& most_;
};

// The layers of the self-check, in every activation.
TEST_P(ExactLayer, NoSumRounds) {
  const ActivationFormat format = GetParam();
  // FP8 tensor cores of Hopper add with 13 bits
  const double most_steps = format == ActivationFormat::kFp8 ? 0x1p13 : 0x1p24;
  for (size_t i = 0; i < EnumNames<Activation>::kAll.size(); ++i) {
    const auto function = static_cast<Activation>(i);
    for (const CheckLayer& layer : check_layers(function)) {
      SCOPED_TRACE(testing::Message()
                   << to_string(function) << " " << layer.hidden << " x " << layer.intermediate);
      const CaseData data = exact_case({4, 2, layer.hidden, layer.intermediate}, format, 2, false,
                                       function, [&](MoeOptions& options) { layer.set(options); });
      CaseRun reference(kReferenceBackend, data);
      ASSERT_TRUE(reference.ok());
      reference.run_steps(data);
      double most = 0;
      std::set<float> outputs;
      PartSums routed(data, reference.buffers().routed, false, most);
      for (int64_t e = 0; e < 4; ++e) routed.expect_exact(e, outputs);
      if (layer.shared_intermediate > 0)
        PartSums(data, reference.buffers().shared, true, most).expect_exact(0, outputs);
      EXPECT_LT(most, most_steps);
      EXPECT_GT(outputs.size(), 100u);
    }
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
