// Every backend through every step, each step fed with the reference's inputs and compared with its
// outputs.
//
// route, quantize, requantize and combine: bit for bit (codes modulo -0). gemm1 and gemm2: the
// contract's bound of each element around the exact value, which is computed here from dequantized
// values.
// Long because every step has its oracle here.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "backend/layer_steps.h"
#include "cases/cases.h"
#include "judge/judge.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/spec_oracle.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int64_t kSplits = 1;

// Accepts any +0 for -0: implementations differ in the sign of a zero code.
uint8_t without_negative_zero(uint8_t byte) {
  if ((byte & 0x0F) == 0x08) byte &= 0xF0;
  if ((byte & 0xF0) == 0x80) byte &= 0x0F;
  return byte;
}

// The two runs of one case: `reference` executes the whole layer, `other` repeats each step on a
// copy of its arrays.
class StepPair {
 public:
  StepPair(const Backend& backend, const CaseData& data)
      : data_(data),
        reference_(kReferenceBackend, data),
        other_(backend, data),
        reference_out_(data.out_bytes()),
        other_out_(data.out_bytes()) {}

  bool ok() const { return reference_.ok() && other_.ok(); }
  const LayerBuffers& expected() const { return reference_.buffers(); }
  const LayerBuffers& actual() const { return other_.buffers(); }
  const MoeOptions& options() const { return data_.spec.options; }
  ActivationFormat format() const { return options().activation_format; }

  // Runs the step on both sides from the same arrays.
  void step(const std::function<void(const LayerSteps&, const StepContext&)>& take) {
    other_.copy_arrays(reference_);
    const Batch batch = data_.batch(reference_out_.data());
    const Batch other_batch = other_.place(data_.batch(other_out_.data()));
    take(*reference_.backend().steps, reference_.step(batch, serial_executor()));
    take(*other_.backend().steps, other_.step(other_batch, serial_executor()));
    other_.fetch(other_batch, other_out_.data());
    EXPECT_EQ(other_.broken_guard(), -1);
  }

  void walk() {
    step([](const LayerSteps& s, const StepContext& step) { EXPECT_OK(s.route(step)); });
    compare_routing();
    step([](const LayerSteps& s, const StepContext& step) { EXPECT_OK(s.quantize(step)); });
    compare_hidden();
    walk_part(expected().routed, &LayerBuffers::routed);
    if (expected().shared.experts > 0) walk_part(expected().shared, &LayerBuffers::shared);
    step([](const LayerSteps& s, const StepContext& step) { EXPECT_OK(s.combine(step)); });
    EXPECT_EQ(
        test::difference(reference_out_, other_out_, data_.spec.out_dtype, options().hidden_size),
        "");
    compare_status();
  }

 private:
  void walk_part(const PartBuffers& part, PartBuffers LayerBuffers::*which) {
    step([&](const LayerSteps& s, const StepContext& step) {
      EXPECT_OK(s.gemm1_swiglu(step, step.buffers.*which));
    });
    compare_gemm1(part, actual().*which);
    step([&](const LayerSteps& s, const StepContext& step) {
      EXPECT_OK(s.requantize(step, step.buffers.*which));
    });
    const int64_t rows = part.row_offsets[part.experts];
    for (int64_t row = 0; row < rows; ++row)
      compare_row(part.intermediate, (actual().*which).intermediate, row, part.intermediate_size,
                  "row");
    compare_status();
    step([&](const LayerSteps& s, const StepContext& step) {
      EXPECT_OK(s.gemm2(step, step.buffers.*which));
    });
    compare_gemm2(part, actual().*which);
  }

  void compare_routing() {
    const int64_t choices = data_.spec.tokens * options().top_k;
    for (int64_t i = 0; i < choices; ++i)
      ASSERT_EQ(expected().row_of_assignment[i], actual().row_of_assignment[i]) << i;
    for (int64_t e = 0; e <= data_.spec.range.count; ++e)
      ASSERT_EQ(expected().routed.row_offsets[e], actual().routed.row_offsets[e]) << "expert " << e;
    for (int64_t row = 0; row < expected().routed.row_offsets[data_.spec.range.count]; ++row)
      ASSERT_EQ(expected().routed.assignment_of_row[row], actual().routed.assignment_of_row[row])
          << "row " << row;
    for (int e = 0; e <= expected().shared.experts && expected().shared.experts > 0; ++e)
      ASSERT_EQ(expected().shared.row_offsets[e], actual().shared.row_offsets[e]);
    compare_status();
  }

  void compare_hidden() {
    for (int64_t t = 0; t < data_.spec.tokens; ++t) {
      const bool has_shared = expected().shared.experts > 0,
                 on_input = options().router_weight == RouterWeight::kOnInput;
      bool has_row = has_shared && !on_input;
      for (int64_t k = 0; k < options().top_k; ++k)
        has_row = has_row || expected().row_of_assignment[t * options().top_k + k] >= 0;
      if (has_row)
        compare_row(expected().routed.hidden, actual().routed.hidden, t, options().hidden_size,
                    "token");
      if (has_shared)
        compare_row(expected().shared.hidden, actual().shared.hidden, t, options().hidden_size,
                    "dense");
    }
    compare_status();
  }

  // Elements [row * count, (row + 1) * count) of an array.
  template <class T>
  static void compare_elements(
      const T* e, const T* a, int64_t row, int64_t count, const std::string& where,
      T (*value)(T) = [](T x) { return x; }) {
    for (int64_t i = row * count; i < (row + 1) * count; ++i)
      ASSERT_EQ(value(e[i]), value(a[i])) << where << " element " << i - row * count;
  }

  void compare_row(const ActivationBuffers& e, const ActivationBuffers& a, int64_t row, int64_t k,
                   const char* what) {
    const std::string where = std::string(what) + " " + std::to_string(row);
    ASSERT_EQ(e.nonfinite[row], a.nonfinite[row]) << where;
    if (e.nonfinite[row] != 0) return;
    switch (format()) {
      case ActivationFormat::kBf16: return compare_elements(e.bf16, a.bf16, row, k, where);
      case ActivationFormat::kInt8Block:
        compare_elements(e.int8_scales, a.int8_scales, row, k / 16, where + " scales");
        return compare_elements(e.int8_codes, a.int8_codes, row, k, where);
      case ActivationFormat::kFp8:
        ASSERT_EQ(e.row_scale[row], a.row_scale[row]) << where;
        return compare_elements(e.fp8, a.fp8, row, k, where);
      case ActivationFormat::kNvfp4: break;
    }
    ASSERT_EQ(e.row_scale[row], a.row_scale[row]) << where;
    compare_elements(e.block_scales, a.block_scales, row, k / 16, where + " scales");
    compare_elements(e.codes, a.codes, row, k / 2, where + " pairs", without_negative_zero);
  }

  void compare_status() { test::expect_same_status(*expected().status, *actual().status); }

  // ---- the exact value of a GEMM element and its sum |p|

  struct Exact {
    double value = 0, sum_abs = 0;
  };
  struct Weight {
    std::vector<double> values;  // (rows, cols)
    double tensor_scale = 1;     // times 2^shift under fp8
  };
  Weight decode(const Nvfp4View& view) const {
    if (format() == ActivationFormat::kFp8) {
      test::OracleFp8Weights fp8 = test::oracle_fp8_weights(view);
      return {std::move(fp8.values), std::ldexp(double{view.tensor_scale}, fp8.shift)};
    }
    return {test::oracle_decode(view.codes, view.block_scales, view.rows, view.cols),
            view.tensor_scale};
  }
  // bias: null if the layer has no biases. It is one more term of the sum and one more addition.
  Exact exact(const std::vector<double>& x_row, const Weight& weight, int64_t n,
              const float* bias) const {
    const size_t k = x_row.size();
    Exact result;
    for (size_t i = 0; i < k; ++i) {
      const double p = x_row[i] * weight.values[static_cast<size_t>(n) * k + i];
      result.value += p;
      result.sum_abs += std::fabs(p);
    }
    result.value *= weight.tensor_scale;
    result.sum_abs *= weight.tensor_scale;
    if (bias != nullptr) {
      result.value += double{bias[n]};
      result.sum_abs += std::fabs(double{bias[n]});
    }
    return result;
  }
  // One row of activations as numbers, with its scale.
  std::vector<double> row_values(const ActivationBuffers& activations, int64_t row,
                                 int64_t k) const {
    std::vector<double> values(static_cast<size_t>(k));
    switch (format()) {
      case ActivationFormat::kNvfp4:
        values = test::oracle_decode(activations.codes + row * (k / 2),
                                     activations.block_scales + row * (k / 16), 1, k);
        for (double& value : values) value *= activations.row_scale[row];
        break;
      case ActivationFormat::kFp8:
        for (int64_t i = 0; i < k; ++i) {
          const uint8_t byte = activations.fp8[row * k + i];
          const double magnitude = test::oracle_e4m3(byte & 127);
          values[static_cast<size_t>(i)] =
              (byte < 128 ? 1 : -1) * magnitude * activations.row_scale[row];
        }
        break;
      case ActivationFormat::kBf16:
        for (int64_t i = 0; i < k; ++i)
          values[static_cast<size_t>(i)] = bf16(activations.bf16[row * k + i]);
        break;
      case ActivationFormat::kInt8Block:
        for (int64_t i = 0; i < k; ++i)
          values[static_cast<size_t>(i)] = activations.int8_codes[row * k + i] *
                                           double{activations.int8_scales[(row * k + i) / 16]};
        break;
    }
    return values;
  }
  static double bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
  ExpertSource source(const PartBuffers& part, int64_t expert) const {
    return data_.expert(part.assignment_of_row == nullptr ? kSharedExpert : expert);
  }

  // actual is within `error` of exact before it is rounded to dtype. If both are non-finite in the
  // same way, they agree.
  static void expect_near(double exact, double error, double actual, DType dtype,
                          const std::string& where) {
    if (std::isnan(exact)) {
      EXPECT_TRUE(std::isnan(actual)) << where << ": expected NaN, got " << actual;
      return;
    }
    const double bound = error + test::oracle_half_ulp(std::fabs(exact) + error, dtype);
    const double largest = 0x1p128;
    if (std::isinf(exact) ||
        std::isinf(actual)) {  // an overflow on one side must be near on the other
      const double magnitude = std::isinf(exact) ? std::fabs(actual) : std::fabs(exact);
      EXPECT_TRUE(std::signbit(exact) == std::signbit(actual) &&
                  magnitude + bound >= largest * (1 - 0x1p-8))
          << where << ": expected " << exact << ", got " << actual;
      return;
    }
    EXPECT_LE(std::fabs(actual - exact), bound)
        << where << ": expected " << exact << ", got " << actual;
  }

  // docs/explanation/numerics.md, section 7.
  double bound_of_gemm(int64_t k, int64_t splits, double sum_abs, double half_ulp) const {
    const bool fp8_tensor_cores =
        test::has_fp8_tensor_cores(other_.backend()) && format() == ActivationFormat::kFp8;
    return (fp8_tensor_cores ? fp8_tensor_core_bound : gemm_bound)(k, splits, sum_abs, half_ulp);
  }

  void compare_gemm1(const PartBuffers& expected_part, const PartBuffers& part) {
    const int64_t k = options().hidden_size, n_count = part.intermediate_size;
    for (int64_t e = 0; e < expected_part.experts; ++e) {
      if (expected_part.row_offsets[e] == expected_part.row_offsets[e + 1]) continue;
      const ExpertSource weights = source(part, e);
      const Weight gate = decode(weights.gate), up = decode(weights.up);
      for (int64_t row = expected_part.row_offsets[e]; row < expected_part.row_offsets[e + 1];
           ++row) {
        const int64_t token = token_of_row(expected_part, row, options().top_k);
        const bool before_down = options().router_weight == RouterWeight::kBeforeDown &&
                                 part.assignment_of_row != nullptr;
        const double router =
            before_down
                ? data_.topk_weights[static_cast<size_t>(expected_part.assignment_of_row[row])]
                : 1.0;
        const bool bad = expected_part.hidden.nonfinite[token] != 0;
        const std::vector<double> x_row =
            bad ? std::vector<double>() : row_values(expected_part.hidden, token, k);
        for (int64_t n = 0; n < n_count; ++n) {
          const double actual = bf16(part.intermediate.bf16[row * n_count + n]);
          const std::string where =
              "gemm1 row " + std::to_string(row) + " channel " + std::to_string(n);
          if (bad) {
            EXPECT_TRUE(std::isnan(actual)) << where;
            continue;
          }
          const Exact u = exact(x_row, up, n, weights.biases.up);
          if (has_gate(options().activation))
            check_swiglu(exact(x_row, gate, n, weights.biases.gate), u, k,
                         weights.biases.gate != nullptr, router, actual, where);
          else
            check_relu2(u, k, weights.biases.up != nullptr, router, actual, where);
        }
      }
    }
  }

  // docs/explanation/numerics.md, section 7: |u f'(g)| dg + |f(g)| du + 4 ulp of fp32 for exp; f'
  // of every variant of swiglu and of situ is at most 1.1 in magnitude, of gelu and gelu_tanh 1.13,
  // and clamps and tanh shorten.
  void check_swiglu(const Exact& g, const Exact& u, int64_t k, bool biased, double router,
                    double actual, const std::string& where) {
    const int64_t splits = kSplits + biased;
    const double dg =
        bound_of_gemm(k, splits, g.sum_abs, test::oracle_half_ulp(g.value, DType::kF32));
    const double du =
        bound_of_gemm(k, splits, u.sum_abs, test::oracle_half_ulp(u.value, DType::kF32));
    const double h = test::oracle_activation_in_double(options(), g.value, u.value);
    double gate = std::fabs(g.value), up = std::fabs(u.value);  // at least the two factors
    if (options().activation == Activation::kSwigluOai) up += 1;
    if (options().activation == Activation::kSitu) {
      gate = std::min(gate, double{*options().situ_gate_limit});
      up = std::min(up, double{*options().situ_up_limit});
    }
    const bool is_gelu =
        options().activation == Activation::kGelu || options().activation == Activation::kGeluTanh;
    const double error = (is_gelu ? 1.13 : 1.1) * (up * dg + gate * du + dg * du) +
                         8 * test::oracle_half_ulp(h, DType::kF32);
    expect_near(h * router, error * router, actual, DType::kBf16, where);
  }

  // The same section: relu(u + du)^2 is within 2 relu(u) du + du^2 of relu(u)^2; the square and the
  // router weight are rounded to fp32.
  void check_relu2(const Exact& u, int64_t k, bool biased, double router, double actual,
                   const std::string& where) {
    const double du =
        bound_of_gemm(k, kSplits + biased, u.sum_abs, test::oracle_half_ulp(u.value, DType::kF32));
    const double h = test::oracle_activation_in_double(options(), 0, u.value);
    const double error =
        2 * std::max(u.value, 0.0) * du + du * du + 2 * test::oracle_half_ulp(h, DType::kF32);
    expect_near(h * router, error * router, actual, DType::kBf16, where);
  }

  void compare_gemm2(const PartBuffers& expected_part, const PartBuffers& part) {
    const int64_t k = part.intermediate_size, n_count = options().hidden_size;
    const DType dtype = options().row_format == RowFormat::kBf16 ? DType::kBf16 : DType::kF32;
    for (int64_t e = 0; e < expected_part.experts; ++e) {
      if (expected_part.row_offsets[e] == expected_part.row_offsets[e + 1]) continue;
      const ExpertSource weights = source(part, e);
      const Weight down = decode(weights.down);
      const int64_t splits = kSplits + (weights.biases.down != nullptr);
      for (int64_t row = expected_part.row_offsets[e]; row < expected_part.row_offsets[e + 1];
           ++row) {
        const bool bad = expected_part.intermediate.nonfinite[row] != 0;
        const std::vector<double> x_row =
            bad ? std::vector<double>() : row_values(expected_part.intermediate, row, k);
        for (int64_t n = 0; n < n_count; ++n) {
          const int64_t i = row * n_count + n;
          const double actual = dtype == DType::kBf16
                                    ? bf16(static_cast<const uint16_t*>(part.rows_out)[i])
                                    : static_cast<const float*>(part.rows_out)[i];
          const std::string where =
              "gemm2 row " + std::to_string(row) + " channel " + std::to_string(n);
          const Exact value =
              bad ? Exact{std::nan(""), 0} : exact(x_row, down, n, weights.biases.down);
          expect_near(value.value, bound_of_gemm(k, splits, value.sum_abs, 0), actual, dtype,
                      where);
        }
      }
    }
  }

  const CaseData& data_;
  test::CaseRun reference_, other_;
  std::vector<uint8_t> reference_out_, other_out_;
};

class Steps : public test::BackendTest {
 protected:
  // Every step over the cases with a number in the table that is, or is not, a multiple of 4.
  void walk_table(bool multiples_of_4) {
    const std::vector<Case>& table = case_table();
    for (size_t at = 0; at < table.size(); ++at) {
      if ((at % 4 == 0) != multiples_of_4) continue;
      const Case& spec = table[at];
      SCOPED_TRACE(spec.name);
      if (test::declines(backend(), *MoeConfig::make(spec.options))) continue;
      const auto data = make_case(spec);
      ASSERT_OK(data);
      StepPair pair(backend(), *data);
      ASSERT_TRUE(pair.ok());
      pair.walk();
      if (::testing::Test::HasFailure()) return;  // one case's coordinates are enough
    }
  }
};

// The table in two tests, since emulators of chips that others have run need the first one only.
TEST_P(Steps, FourthCasesEveryStep) { walk_table(true); }
TEST_P(Steps, OtherCasesEveryStep) { walk_table(false); }

class Unpack : public test::BackendTest {};

TEST_P(Unpack, GivesTheSourceBack) {
  for (const Case& spec : case_table()) {
    if (spec.tokens > 12) continue;  // fewer cases still have every shape
    SCOPED_TRACE(spec.name);
    if (test::declines(backend(), *MoeConfig::make(spec.options))) continue;
    const auto data = make_case(spec);
    ASSERT_OK(data);
    test::CaseRun run(backend(), *data);
    ASSERT_TRUE(run.ok());
    for (int64_t e = spec.options.shared_intermediate_size > 0 ? kSharedExpert : 0;
         e < spec.range.count; ++e) {
      ExpertBuffers out;
      ASSERT_OK(backend().unpack_expert(run.weights(), e, {}, out));
      const ExpertBuffers& in =
          data->experts[static_cast<size_t>(e == kSharedExpert ? spec.range.count : e)];
      EXPECT_EQ(out.gate.codes, in.gate.codes);
      EXPECT_EQ(out.gate.block_scales, in.gate.block_scales);
      EXPECT_EQ(out.up.codes, in.up.codes);
      EXPECT_EQ(out.up.block_scales, in.up.block_scales);
      EXPECT_EQ(out.down.codes, in.down.codes);
      EXPECT_EQ(out.down.block_scales, in.down.block_scales);
      EXPECT_EQ(out.gate_bias, in.gate_bias);
      EXPECT_EQ(out.up_bias, in.up_bias);
      EXPECT_EQ(out.down_bias, in.down_bias);
    }
  }
}

// reference_test.cpp compares the reference's own steps with the oracle, bit for bit.
INSTANTIATE_TEST_SUITE_P(Backends, Steps, ::testing::ValuesIn(test::judged_backends()),
                         test::hardware_test_name<Backend>);
INSTANTIATE_TEST_SUITE_P(Backends, Unpack, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
