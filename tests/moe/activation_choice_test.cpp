// The rule of activation_format "auto": each backend's format for each declaration.
#include "moe/activation_choice.h"

#include "core/activation_precision.h"
#include "moe/cached_model.h"
#include "moe/registry.h"
#include "support/backends.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
using Format = ActivationFormat;

// docs/explanation/numerics.md, section 2.
TEST(ActivationChoice, FollowsTheTable) {
  const struct {
    const char* backend;
    Format of_nvfp4, of_fp8;
  } rows[] = {
      {"sm100", Format::kNvfp4, Format::kBf16},
      {"sm120", Format::kNvfp4, Format::kFp8},
      {"sm90", Format::kBf16, Format::kFp8},
      {"cuda", Format::kBf16, Format::kFp8},
      {"cpu", Format::kInt8Block, Format::kFp8},
      {"cpu:avx2", Format::kInt8Block, Format::kFp8},
      {"reference", Format::kInt8Block, Format::kFp8},
  };
  for (const auto& row : rows) {
    const auto chosen = [&](Format declared) {
      return must(choose_activation_format(declared, row.backend))->format;
    };
    EXPECT_EQ(chosen(Format::kBf16), Format::kBf16) << row.backend;
    EXPECT_EQ(chosen(Format::kNvfp4), row.of_nvfp4) << row.backend;
    EXPECT_EQ(chosen(Format::kFp8), row.of_fp8) << row.backend;
  }
  EXPECT_THAT(choose_activation_format(Format::kNvfp4, "auto"),
              Refused(Code::kInvalidArgument, "sm100"));
  EXPECT_THAT(choose_activation_format(Format::kInt8Block, "cpu"),
              Refused(Code::kInvalidArgument, "declared: expected bf16, nvfp4 or fp8, got int8"));
}

TEST(ActivationChoice, KnowsEveryBackendAndIsNeverLessPreciseThanDeclared) {
  const Format ascending[] = {Format::kNvfp4, Format::kFp8, Format::kInt8Block, Format::kBf16};
  for (size_t i = 0; i < 4; ++i)
    for (size_t j = 0; j < 4; ++j) EXPECT_EQ(less_precise(ascending[i], ascending[j]), i < j);
  for (const Backend* backend : backends())
    for (const Format declared : {Format::kBf16, Format::kNvfp4, Format::kFp8}) {
      const auto choice = must(choose_activation_format(declared, backend->name));
      EXPECT_FALSE(less_precise(choice->format, declared)) << backend->name;
      EXPECT_FALSE(choice->because.empty());
    }
}

// A requested scale keeps the declared format.
TEST(ActivationChoice, FollowsTheScalesThatAreAskedFor) {
  MoeOptions options = tiny_options();
  const auto chosen = [&](const char* backend) {
    return must(choose_activation_format(options, host_facts(), backend))->format;
  };
  EXPECT_EQ(chosen("auto"), Format::kInt8Block);
  EXPECT_EQ(chosen("reference"), Format::kInt8Block);
  options.activation_scale = ActivationScale::kStatic;
  EXPECT_EQ(chosen("auto"), Format::kNvfp4);
  options.activation_scale = ActivationScale::kDynamicToken;
  options.intermediate_scale = IntermediateScale::kVllmOrder;
  EXPECT_EQ(chosen("cpu"), Format::kNvfp4);
  EXPECT_EQ(choose_activation_format(options, host_facts(), "nonesuch").status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(choose_activation_format(options, gpu_of(90), "cpu").status().code(),
            Code::kUnsupported);
}

class ActivationChoiceInCache : public CachedModel {};

// "auto" is resolved before the cache's key is made: a layer in another format has another entry.
// The description has the reason.
TEST_F(ActivationChoiceInCache, TheFormatOfAutoIsPartOfTheKey) {
  const auto chosen = open();
  EXPECT_EQ(chosen->config()->activation_format, Format::kInt8Block);  // W4A4 is declared
  EXPECT_THAT(chosen->describe_json(),
              HasSubstr("W4A4 is declared and int8_block is more precise"));
  MoeOptions options = stored();
  EXPECT_EQ(options.activation_format, Format::kNvfp4);
  EXPECT_THAT(open(options)->describe_json(),
              HasSubstr("it was asked for; declared: nvfp4 (quant_algo NVFP4)"));
  EXPECT_FALSE(outcome_.hit);
  EXPECT_THAT(outcome_.reason, HasSubstr("expected key"));
  options.activation_format = Format::kInt8Block;
  open(options);
  EXPECT_FALSE(outcome_.hit);  // the entry has the format that was requested last
  open();
  EXPECT_TRUE(outcome_.hit);
  EXPECT_EQ(reason_of_format(Format::kNvfp4, {Format::kBf16, "quant_method mxfp4"}, "cpu"),
            "it was asked for, less precise than declared: bf16 (quant_method mxfp4)");
}

}  // namespace
}  // namespace nvfp4_moe::internal
