// The rule of activation_format "auto": what each backend runs of what a checkpoint declares.
#include "moe/activation_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/registry.h"

namespace nvfp4_moe {
namespace {

using testing::HasSubstr;

constexpr ActivationFormat kDeclarable[] = {ActivationFormat::kBf16, ActivationFormat::kNvfp4, ActivationFormat::kFp8};

ActivationFormat chosen(ActivationFormat declared, const char* backend) {
  const auto choice = choose_activation_format(declared, backend);
  EXPECT_TRUE(choice.ok()) << backend;
  return choice->format;
}

// docs/numerics.md, section 2.
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
  const ActivationFormat ascending[] = {ActivationFormat::kNvfp4, ActivationFormat::kFp8, ActivationFormat::kInt8Block,
                                        ActivationFormat::kBf16};
  for (size_t i = 0; i < std::size(ascending); ++i)
    for (size_t j = 0; j < std::size(ascending); ++j) EXPECT_EQ(less_precise(ascending[i], ascending[j]), i < j);
}

TEST(ActivationChoice, RefusesNamesThatItDoesNotKnow) {
  EXPECT_THAT(choose_activation_format(ActivationFormat::kNvfp4, "auto").status().message(), HasSubstr("sm100"));
  EXPECT_THAT(choose_activation_format(ActivationFormat::kInt8Block, "cpu").status().message(),
              HasSubstr("declared: expected bf16, nvfp4 or fp8, got int8_block"));
}

}  // namespace
}  // namespace nvfp4_moe
