// The rule of activation_format "auto": each backend's format for each declaration.
#include "moe/activation_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/activation_precision.h"
#include "moe/cached_model.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace {

using testing::HasSubstr;

constexpr ActivationFormat kDeclarable[] = {ActivationFormat::kBf16, ActivationFormat::kNvfp4,
                                            ActivationFormat::kFp8};

ActivationFormat chosen(ActivationFormat declared, const char* backend) {
  const auto choice = choose_activation_format(declared, backend);
  EXPECT_TRUE(choice.ok()) << backend;
  return choice->format;
}

// docs/explanation/numerics.md, section 2.
TEST(ActivationChoice, FollowsTheTable) {
  const struct {
    const char* backend;
    ActivationFormat of_nvfp4, of_fp8;
  } rows[] = {
      {"sm100", ActivationFormat::kNvfp4, ActivationFormat::kBf16},
      {"sm120", ActivationFormat::kNvfp4, ActivationFormat::kFp8},
      {"sm90", ActivationFormat::kBf16, ActivationFormat::kFp8},
      {"cuda", ActivationFormat::kBf16, ActivationFormat::kFp8},
      {"cpu", ActivationFormat::kInt8Block, ActivationFormat::kFp8},
      {"cpu:avx2", ActivationFormat::kInt8Block, ActivationFormat::kFp8},
      {"reference", ActivationFormat::kInt8Block, ActivationFormat::kFp8},
  };
  for (const auto& row : rows) {
    EXPECT_EQ(chosen(ActivationFormat::kBf16, row.backend), ActivationFormat::kBf16) << row.backend;
    EXPECT_EQ(chosen(ActivationFormat::kNvfp4, row.backend), row.of_nvfp4) << row.backend;
    EXPECT_EQ(chosen(ActivationFormat::kFp8, row.backend), row.of_fp8) << row.backend;
  }
}

TEST(ActivationChoice, KnowsEveryBackendAndIsNeverLessPreciseThanDeclared) {
  for (const Backend* backend : backends()) {
    for (const ActivationFormat declared : kDeclarable) {
      const auto choice = choose_activation_format(declared, backend->name);
      ASSERT_TRUE(choice.ok()) << backend->name << ": " << choice.status().message();
      EXPECT_FALSE(less_precise(choice->format, declared)) << backend->name;
      EXPECT_FALSE(choice->because.empty());
    }
  }
}

TEST(ActivationChoice, OrdersFormatsByPrecision) {
  const ActivationFormat ascending[] = {ActivationFormat::kNvfp4, ActivationFormat::kFp8,
                                        ActivationFormat::kInt8Block, ActivationFormat::kBf16};
  for (size_t i = 0; i < std::size(ascending); ++i)
    for (size_t j = 0; j < std::size(ascending); ++j)
      EXPECT_EQ(less_precise(ascending[i], ascending[j]), i < j);
}

// If a backend declines the rule's format, the next more precise one is used; a requested scale
// keeps the format.
TEST(ActivationChoice, FollowsWhatABackendTakesAndTheScalesThatAreAskedFor) {
  MoeOptions options = test::tiny_options();
  options.activation_format = ActivationFormat::kNvfp4;
  const DeviceFacts host = host_facts();
  EXPECT_EQ(choose_activation_format(options, host, "auto")->format, ActivationFormat::kInt8Block);
  EXPECT_EQ(choose_activation_format(options, host, "reference")->format,
            ActivationFormat::kInt8Block);
  options.activation_scale = ActivationScale::kStatic;
  EXPECT_EQ(choose_activation_format(options, host, "auto")->format, ActivationFormat::kNvfp4);
  options.activation_scale = ActivationScale::kDynamicToken;
  options.intermediate_scale = IntermediateScale::kCompat;
  EXPECT_EQ(choose_activation_format(options, host, "cpu")->format, ActivationFormat::kNvfp4);
  options.intermediate_scale = IntermediateScale::kDynamicToken;
  EXPECT_EQ(choose_activation_format(options, host, "nonesuch").status().code(),
            Code::kInvalidArgument);
  DeviceFacts other = host;
  other.kind = DeviceKind::kCuda;
  EXPECT_EQ(choose_activation_format(options, other, "cpu").status().code(), Code::kUnsupported);
  for (const ActivationFormat declared : kDeclarable) {
    options.activation_format = declared;
    LayerOptions layer;
    layer.backend = "cpu";
    EXPECT_FALSE(less_precise(with_chosen_format(options, layer)->activation_format, declared));
  }
}

TEST(ActivationChoice, SaysWhoChoseTheFormat) {
  const DeclaredActivations weight_only{ActivationFormat::kBf16, "quant_method mxfp4"};
  EXPECT_EQ(reason_of_format(ActivationFormat::kBf16, weight_only, "cpu"),
            "no quantization of activations is declared (quant_method mxfp4)");
  EXPECT_EQ(reason_of_format(ActivationFormat::kNvfp4, weight_only, "cpu"),
            "it was asked for, less precise than declared: bf16 (quant_method mxfp4)");
  const DeclaredActivations w4a4{ActivationFormat::kNvfp4, "quant_algo NVFP4"};
  EXPECT_EQ(reason_of_format(ActivationFormat::kBf16, w4a4, "cpu"),
            "it was asked for; declared: nvfp4 (quant_algo NVFP4)");
}

TEST(ActivationChoice, RefusesNamesThatItDoesNotKnow) {
  EXPECT_THAT(choose_activation_format(ActivationFormat::kNvfp4, "auto").status().message(),
              HasSubstr("sm100"));
  EXPECT_THAT(choose_activation_format(ActivationFormat::kInt8Block, "cpu").status().message(),
              HasSubstr("declared: expected bf16, nvfp4 or fp8, got int8_block"));
}

class ActivationChoiceInCache : public test::CachedModel {};

// "auto" is resolved before the cache's key is made: a layer in another format has another entry.
TEST_F(ActivationChoiceInCache, TheFormatOfAutoIsPartOfTheKey) {
  const auto chosen = open();
  EXPECT_EQ(chosen->config()->activation_format,
            ActivationFormat::kInt8Block);  // W4A4 is declared, on a host
  EXPECT_THAT(chosen->describe_json(),
              HasSubstr("W4A4 is declared and int8_block is more precise"));
  MoeOptions options = stored();
  EXPECT_EQ(options.activation_format, ActivationFormat::kNvfp4);
  EXPECT_THAT(open(options)->describe_json(),
              HasSubstr("it was asked for; declared: nvfp4 (quant_algo NVFP4)"));
  EXPECT_FALSE(outcome_.hit);
  EXPECT_THAT(outcome_.reason, HasSubstr("expected key"));
  options.activation_format = ActivationFormat::kInt8Block;
  open(options);
  EXPECT_FALSE(outcome_.hit);  // the entry has the format that was requested last
  open();
  EXPECT_TRUE(outcome_.hit);
}

}  // namespace
}  // namespace nvfp4_moe::internal
