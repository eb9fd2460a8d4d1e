// Instruction sets against each other: the same bits for 8-bit activations and for everything
// around the GEMMs.
#include "backend/cpu/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "backend/cpu/scratch.h"
#include "cases/cases.h"
#include "core/float_formats.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/spec_oracle.h"
#include "support/support.h"

namespace nvfp4_moe::internal::cpu {
namespace {

constexpr Activation kGated[] = {Activation::kSwiglu,     Activation::kSwigluClamped,
                                 Activation::kSwigluStep, Activation::kSwigluOai,
                                 Activation::kGelu,       Activation::kGeluTanh,
                                 Activation::kSitu};

MoeOptions options_of(Activation activation, float limit) {
  MoeOptions options;
  options.activation = activation;
  if (has_swiglu_limit(activation)) options.swiglu_limit = limit;
  if (activation == Activation::kSitu)
    options.situ_gate_limit = limit, options.situ_up_limit = 4 * limit;
  return options;
}

// One row of 16 gates and 16 ups.
std::vector<uint16_t> swiglu(const Kernels& kernels, const MoeOptions& options, const float* acc) {
  const float one = 1.0f;
  std::vector<uint16_t> out(16);
  kernels.swiglu(options, {.acc = acc,
                           .count = 1,
                           .gate_alpha = &one,
                           .up_alpha = &one,
                           .weight = nullptr,
                           .out = out.data(),
                           .stride = 16});
  return out;
}

TEST(Kernels, TheBestOneRunsHereAndPortableIsLast) {
  const std::span<const Kernels* const> all = kAllKernels;
  EXPECT_TRUE(best_kernels().runs_on_host());
  EXPECT_EQ(all.back(), &kPortableKernels);
  EXPECT_TRUE(kPortableKernels.runs_on_host());
  const auto faster =
      std::count_if(all.begin(), all.end() - 1, [](const Kernels* k) { return k->runs_on_host(); });
  EXPECT_EQ(&best_kernels() == &kPortableKernels, faster == 0);
  RecordProperty("auto", best_kernels().backend_name);
}

// Whole layers of the case table: every instruction set gives the same bytes.
class InstructionSetLayer : public test::BackendTest {
 protected:
  void expect_portables_bits(ActivationFormat one, ActivationFormat other) {
    const Backend& portable_backend = cpu_instruction_sets().back();
    int64_t compared = 0;
    for (const Case& spec : case_table()) {
      if (spec.options.activation_format != one && spec.options.activation_format != other)
        continue;
      if (&backend() == &portable_backend && spec.options.hidden_size > 64)
        continue;  // not compared with itself
      SCOPED_TRACE(spec.name);
      const auto data = test::must(make_case(spec));
      test::CaseRun portable(portable_backend, *data), run(backend(), *data);
      ASSERT_TRUE(portable.ok() && run.ok());
      ASSERT_EQ(test::difference(portable.run(*data), run.run(*data), spec.out_dtype,
                                 spec.options.hidden_size),
                "");
      ++compared;
    }
    EXPECT_GT(compared, 50);
  }
  const Kernels& kernels() const {
    for (const Kernels* kernels : kAllKernels)
      if (backend().name == std::string_view(kernels->backend_name)) return *kernels;
    return kPortableKernels;
  }
};

// A batch may use the workspace of a larger one, although only small ones have operands for single
// rows. With many experts those are most of it.
TEST_P(InstructionSetLayer, AWorkspaceOfMoreTokensIsNoSmaller) {
  MoeOptions options;
  options.num_experts = 128;
  options.top_k = 2;
  options.hidden_size = 2048;
  options.intermediate_size = 64;
  for (const ActivationFormat format : {ActivationFormat::kBf16, ActivationFormat::kInt8Block}) {
    options.activation_format = format;
    const auto config = test::must(MoeConfig::make(options));
    size_t bytes = 0;
    for (int64_t tokens = 1; tokens <= 200; ++tokens) {
      Arena arena;
      LayerScratch(*config, {0, options.num_experts}, tokens, kernels(), arena);
      ASSERT_GE(arena.size_bytes(), bytes) << to_string(format) << " tokens " << tokens;
      bytes = arena.size_bytes();
    }
  }
}

TEST_P(InstructionSetLayer, OfIntegerProductsHasPortablesBits) {
  expect_portables_bits(ActivationFormat::kNvfp4, ActivationFormat::kInt8Block);
}
// Each instruction set adds products in bf16 in another order.
TEST_P(InstructionSetLayer, OfProductsInFp32HasPortablesBits) {
  if (std::string_view(kernels().bf16.name).find("fp32") == std::string_view::npos)
    GTEST_SKIP() << backend().name << " multiplies in bf16 (" << kernels().bf16.name << ")";
  expect_portables_bits(ActivationFormat::kBf16, ActivationFormat::kFp8);
}
INSTANTIATE_TEST_SUITE_P(Cpu, InstructionSetLayer,
                         ::testing::ValuesIn(test::instruction_set_backends()),
                         test::hardware_test_name<Backend>);

class InstructionSet : public test::KernelsTest {};
INSTANTIATE_TEST_SUITE_P(Cpu, InstructionSet, ::testing::ValuesIn(test::instruction_sets()),
                         test::hardware_test_name<Kernels>);

// Every activation over all binades and far below zero, where e^-g leaves fp32's range and silu(g)
// u underflows to 0, against long double: 4 ulps of fp32, the bound that the contract gives to exp,
// and half an ulp of bf16.
TEST_P(InstructionSet, ActivationsOfEveryMagnitudeAreWithinFourUlpBeforeTheirRounding) {
  std::vector<float> gates = {0.0f, -0.0f, 87.5f, -87.5f, 88.5f, -88.5f, 500.0f};
  for (int exponent = -40; exponent <= 6; ++exponent)
    for (int step = 0; step < 64; ++step)
      for (const float sign : {1.0f, -1.0f})
        gates.push_back(sign * std::ldexp(1.0f + static_cast<float>(step) / 64.0f, exponent));
  for (float g = -60; g > -190; g -= 0.173f) gates.push_back(g);
  gates.resize((gates.size() + 15) / 16 * 16, 1.0f);
  for (const Activation activation : kGated) {
    const bool oai = activation == Activation::kSwigluOai;
    MoeOptions options = options_of(activation, 7.0f);
    if (oai) options.swiglu_alpha = 1.5f;  // products of few bits are exact
    for (const float up : {1.0f, -3e5f, 3e38f}) {
      for (size_t first = 0; first < gates.size(); first += 16) {
        float acc[kStripRows];
        for (size_t i = 0; i < 16; ++i) {
          const float g = gates[first + i];
          acc[i] = oai && std::fabs(g) > 1 ? std::round(g * 16) / 16 : g;
          acc[i + 16] = up;
        }
        const std::vector<uint16_t> out = swiglu(kernels(), options, acc);
        for (size_t i = 0; i < 16; ++i) {
          const long double exact = test::oracle_activation(options, acc[i], up);
          if (std::abs(exact) > 0x1p127L) continue;  // beyond fp32, or close to its limit
          const long double fp32 = std::max(std::abs(exact), 0x1p-126L) * 0x1p-22L;
          const long double bf16 = std::max(std::abs(exact) * 0x1p-8L, 0x1p-134L);
          ASSERT_LE(std::abs(bf16_to_float(out[i]) - exact), fp32 + bf16)
              << to_string(activation) << " of " << acc[i] << " and " << up;
        }
      }
    }
  }
}

// gelu, gelu_tanh and situ have the bits of core/gelu_situ.h: all signs and exponents of gate and
// up.
TEST_P(InstructionSet, GeluAndSituHaveTheScalarFunctionsBits) {
  for (const Activation activation :
       {Activation::kGelu, Activation::kGeluTanh, Activation::kSitu}) {
    const MoeOptions options = options_of(activation, 4.0f);
    const GatedActivation scalar = GatedActivation::of(options);
    for (uint32_t first = 0; first < 1u << 16; first += 16) {
      float acc[kStripRows];
      for (uint32_t i = 0; i < 16; ++i) {
        acc[i] = std::bit_cast<float>((first + i) * 65537u);
        acc[i + 16] = std::bit_cast<float>((first + i) * 2654435761u);
      }
      const std::vector<uint16_t> out = swiglu(kernels(), options, acc);
      for (size_t i = 0; i < 16; ++i) {
        const float exact = scalar(acc[i], acc[i + 16]);
        ASSERT_TRUE(std::isnan(exact) ? std::isnan(bf16_to_float(out[i]))
                                      : out[i] == bf16_from_float(exact))
            << to_string(activation) << " of " << acc[i] << " and " << acc[i + 16];
      }
    }
  }
}

TEST_P(InstructionSet, SwigluKeepsNan) {
  for (const Activation activation : kGated) {
    const MoeOptions options = options_of(activation, 10.0f);
    for (const size_t bad : {size_t{3}, size_t{16 + 3}}) {  // a gate, an up
      float acc[kStripRows];
      std::fill(acc, acc + kStripRows, 1.0f);
      acc[bad] = std::nanf("");
      const std::vector<uint16_t> out = swiglu(kernels(), options, acc);
      for (size_t i = 0; i < 16; ++i) EXPECT_EQ(std::isnan(bf16_to_float(out[i])), i == 3);
    }
  }
}

// relu2's epilogue against double over all binades: one rounding to fp32, then one to bf16. The
// result is +0 for everything that is not positive, NaN for NaN, and the router weight is applied
// after the square.
TEST_P(InstructionSet, Relu2OfEveryMagnitude) {
  std::vector<float> ups;
  for (int exponent = -149; exponent <= 127; ++exponent)
    for (const float sign : {1.0f, -1.0f})
      for (const float significand : {1.0f, 1.3125f, 1.9999999f})
        ups.push_back(sign * std::ldexp(significand, exponent));
  const float inf = std::numeric_limits<float>::infinity();
  for (const float special : {0.0f, -0.0f, inf, -inf, std::nanf(""), -std::nanf("")})
    ups.push_back(special);
  ups.resize((ups.size() + 31) / 32 * 32, 1.0f);
  const float alpha = 2.0f, weight = 0.75f;
  for (size_t first = 0; first < ups.size(); first += kStripRows) {
    uint16_t out[kStripRows];
    kernels().round({.acc = ups.data() + first,
                     .acc_stride = kStripRows,
                     .count = 1,
                     .channels = kStripRows,
                     .alpha = &alpha,
                     .relu2 = true,
                     .weight = &weight,
                     .out = out,
                     .stride = kStripRows});
    for (size_t i = 0; i < kStripRows; ++i) {
      const double up = 2.0 * ups[first + i], actual = bf16_to_float(out[i]);
      if (std::isnan(up)) {
        EXPECT_TRUE(std::isnan(actual));
        continue;
      }
      const double exact = up > 0 ? 0.75 * up * up : 0.0;
      if (up > 0x1p64 * 0.99) {  // the square is beyond fp32, or close to its limit
        EXPECT_TRUE(std::isinf(actual) || up < 0x1p64) << "up " << up;
        continue;
      }
      ASSERT_LE(std::fabs(actual - exact), exact * (3 * 0x1p-24 + 0x1p-8) + 0x1p-134 + 0x1p-149)
          << "up " << up;
      EXPECT_FALSE(std::signbit(actual)) << "up " << up;
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::cpu
