// MoeConfig::make: every legal choice passes, and the error for every illegal value names it with
// the expected and the actual value.
#include "core/config.h"

#include <functional>
#include <limits>

#include "cases/cases.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

MoeOptions legal() {
  MoeOptions options;
  set_sizes(options, 8, 2, 64, 48);
  return options;
}

TEST(MoeConfig, AcceptsEveryCombinationOfNames) {
  int made = 0;
  for (int activation = 0; activation < 5; ++activation)
    for (int format = 0; format < 2; ++format)
      for (int hidden = 0; hidden < 3; ++hidden)
        for (int intermediate = 0; intermediate < 3; ++intermediate)
          for (int weight = 0; weight < 2; ++weight)
            for (int row = 0; row < 2; ++row) {
              MoeOptions o = legal();
              o.activation = static_cast<Activation>(activation);
              if (activation != 0 && activation != 4) o.swiglu_limit = 7.0f;
              o.activation_format = static_cast<ActivationFormat>(format);
              o.activation_scale = static_cast<ActivationScale>(hidden);
              o.intermediate_scale = static_cast<IntermediateScale>(intermediate);
              o.router_weight = static_cast<RouterWeight>(weight);
              o.row_format = static_cast<RowFormat>(row);
              o.expert_biases = o.router_weight == RouterWeight::kAfterDown && row == 1;
              const auto config = must(MoeConfig::make(o));
              EXPECT_EQ(config->options(), o);
              ++made;
            }
  EXPECT_EQ(made, 5 * 2 * 3 * 3 * 2 * 2);
}

TEST(MoeConfig, AcceptsTheReferenceShapes) {
  struct Shape {
    int64_t experts, top_k, hidden, intermediate;
  };
  for (const Shape& s : {Shape{384, 6, 7168, 3072},
                         {256, 6, 4096, 2048},
                         {128, 8, 2048, 768},
                         {8, 2, 4096, 14336}}) {
    MoeOptions o = legal();
    set_sizes(o, s.experts, s.top_k, s.hidden, s.intermediate);
    o.shared_intermediate_size = s.intermediate;
    EXPECT_OK(MoeConfig::make(o));
  }
}

struct Refusal {
  const char* message;
  std::function<void(MoeOptions&)> change;
};

TEST(MoeConfig, RefusesWithExpectedAndActual) {
  const Refusal refusals[] = {
      {"num_experts: expected 1..65536, got 0", [](MoeOptions& o) { o.num_experts = 0; }},
      {"num_experts: expected 1..65536, got 65537", [](MoeOptions& o) { o.num_experts = 65537; }},
      {"top_k: expected 1..8, got 0", [](MoeOptions& o) { o.top_k = 0; }},
      {"top_k: expected 1..8, got 9", [](MoeOptions& o) { o.top_k = 9; }},
      {"hidden_size: expected a positive multiple of 16 up to 1048576, got 0",
       [](MoeOptions& o) { o.hidden_size = 0; }},
      {"hidden_size: expected a positive multiple of 16 up to 1048576, got 72",
       [](MoeOptions& o) { o.hidden_size = 72; }},
      {"hidden_size: expected a positive multiple of 16 up to 1048576, got -16",
       [](MoeOptions& o) { o.hidden_size = -16; }},
      {"intermediate_size: expected a positive multiple of 16 up to 1048576, got "
       "9223372036854775792",
       [](MoeOptions& o) { o.intermediate_size = std::numeric_limits<int64_t>::max() - 15; }},
      {"shared_intermediate_size: expected a positive multiple of 16 up to 1048576, got 8",
       [](MoeOptions& o) { o.shared_intermediate_size = 8; }},
      {"activation: expected one of swiglu, swiglu_clamped, swiglu_step, swiglu_oai, relu2, got 5",
       [](MoeOptions& o) { o.activation = static_cast<Activation>(5); }},
      {"activation_format: expected one of nvfp4, bf16, int8_block, fp8, got 200",
       [](MoeOptions& o) { o.activation_format = static_cast<ActivationFormat>(200); }},
      {"activation_scale: expected one of dynamic_token, static, compat, got 3",
       [](MoeOptions& o) { o.activation_scale = static_cast<ActivationScale>(3); }},
      {"intermediate_scale: expected one of dynamic_token, fixed, compat, got 3",
       [](MoeOptions& o) { o.intermediate_scale = static_cast<IntermediateScale>(3); }},
      {"router_weight: expected one of after_down, before_down, on_input, got 3",
       [](MoeOptions& o) { o.router_weight = static_cast<RouterWeight>(3); }},
      {"top_k: expected 1 with router_weight on_input (hidden times one expert's weight), got 2",
       [](MoeOptions& o) { o.router_weight = RouterWeight::kOnInput; }},
      {"row_format: expected one of bf16, fp32, got 2",
       [](MoeOptions& o) { o.row_format = static_cast<RowFormat>(2); }},
      {"swiglu_limit: expected none with activation swiglu, got 7",
       [](MoeOptions& o) { o.swiglu_limit = 7.0f; }},
      {"swiglu_limit: expected none with activation relu2, got 7",
       [](MoeOptions& o) {
         o.activation = Activation::kRelu2;
         o.swiglu_limit = 7.0f;
       }},
      {"swiglu_limit: expected a limit with activation swiglu_clamped, got none",
       [](MoeOptions& o) { o.activation = Activation::kSwigluClamped; }},
      {"swiglu_limit: expected a limit with activation swiglu_step, got none",
       [](MoeOptions& o) { o.activation = Activation::kSwigluStep; }},
      {"swiglu_limit: expected a limit with activation swiglu_oai, got none",
       [](MoeOptions& o) { o.activation = Activation::kSwigluOai; }},
      {"swiglu_limit: expected finite and > 0, got -1",
       [](MoeOptions& o) {
         o.activation = Activation::kSwigluOai;
         o.swiglu_limit = -1.0f;
       }},
      {"swiglu_limit: expected finite and > 0, got inf",
       [](MoeOptions& o) {
         o.activation = Activation::kSwigluStep;
         o.swiglu_limit = kInf;
       }},
      {"swiglu_alpha: expected finite and > 0, got nan",
       [](MoeOptions& o) { o.swiglu_alpha = kNan; }},
      {"swiglu_alpha: expected none (1.702) with activation swiglu, got 2",
       [](MoeOptions& o) { o.swiglu_alpha = 2; }},
      {"swiglu_alpha: expected none (1.702) with activation swiglu_step, got 2",
       [](MoeOptions& o) {
         o.activation = Activation::kSwigluStep;
         o.swiglu_limit = 7.0f;
         o.swiglu_alpha = 2;
       }},
      {"swiglu_alpha: expected none (1.702) with activation relu2, got 1",
       [](MoeOptions& o) {
         o.activation = Activation::kRelu2;
         o.swiglu_alpha = 1;
       }},
      {"static_headroom: expected none (1) with activation_scale dynamic_token, got 16",
       [](MoeOptions& o) { o.static_headroom = 16; }},
      {"static_headroom: expected none (1) with activation_scale compat, got 2",
       [](MoeOptions& o) {
         o.activation_scale = ActivationScale::kCompat;
         o.static_headroom = 2;
       }},
      {"intermediate_fixed: expected none with intermediate_scale dynamic_token, got 0.5",
       [](MoeOptions& o) { o.intermediate_fixed = 0.5f; }},
      {"intermediate_fixed: expected a power of two in [2^-126, 2^127], got 0.300000012",
       [](MoeOptions& o) {
         o.intermediate_scale = IntermediateScale::kFixed;
         o.intermediate_fixed = 0.3f;
       }},
      {"static_headroom: expected a power of two in [2^-126, 2^127], got 3",
       [](MoeOptions& o) { o.static_headroom = 3.0f; }},
      {"static_headroom: expected a power of two in [2^-126, 2^127], got -2",
       [](MoeOptions& o) { o.static_headroom = -2.0f; }},
      {"activation_scale: expected dynamic_token with activation_format int8_block (each block of "
       "16 has its own "
       "scale), got static",
       [](MoeOptions& o) {
         o.activation_format = ActivationFormat::kInt8Block;
         o.activation_scale = ActivationScale::kStatic;
       }},
      {"intermediate_scale: expected dynamic_token with activation_format int8_block (each block "
       "of 16 has its own "
       "scale), got compat",
       [](MoeOptions& o) {
         o.activation_format = ActivationFormat::kInt8Block;
         o.intermediate_scale = IntermediateScale::kCompat;
       }},
      {"activation_scale: expected dynamic_token or static with activation_format fp8 (compat is "
       "an order of "
       "operations for NVFP4), got compat",
       [](MoeOptions& o) {
         o.activation_format = ActivationFormat::kFp8;
         o.activation_scale = ActivationScale::kCompat;
       }},
      {"intermediate_scale: expected dynamic_token or fixed with activation_format fp8 (compat is "
       "an order of "
       "operations for NVFP4), got compat",
       [](MoeOptions& o) {
         o.activation_format = ActivationFormat::kFp8;
         o.intermediate_scale = IntermediateScale::kCompat;
       }},
      {"router_weight: expected after_down with expert_biases (the weight multiplies the down bias "
       "too), got "
       "before_down",
       [](MoeOptions& o) {
         o.expert_biases = true;
         o.router_weight = RouterWeight::kBeforeDown;
       }},
      {"router_weight: expected after_down with expert_biases (the weight multiplies the down bias "
       "too), got on_input",
       [](MoeOptions& o) {
         o.expert_biases = true;
         o.router_weight = RouterWeight::kOnInput;
         o.top_k = 1;
       }},
      {"max_router_weight: expected finite and > 0, got 0",
       [](MoeOptions& o) { o.max_router_weight = 0.0f; }},
  };
  EXPECT_OK(MoeConfig::make(legal()));
  for (const Refusal& refusal : refusals) {
    MoeOptions o = legal();
    refusal.change(o);
    const auto config = MoeConfig::make(o);
    EXPECT_FALSE(config.ok()) << refusal.message;
    EXPECT_EQ(config.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(config.status().message(), refusal.message);
  }
}

// docs/explanation/numerics.md, section 2: options that a layer would not use are refused.
TEST(MoeConfig, OptionsThatNothingUsesAreRefused) {
  struct Rule {
    const char* option;
    std::function<void(MoeOptions&)> change;
    std::function<bool(const MoeOptions&)> legal;
  };
  const auto has_compat = [](const MoeOptions& o) {
    return o.activation_format == ActivationFormat::kNvfp4 ||
           o.activation_format == ActivationFormat::kBf16;
  };
  const auto has_row_scales = [](const MoeOptions& o) {
    return o.activation_format != ActivationFormat::kInt8Block;
  };
  const Rule rules[] = {
      {"swiglu_alpha", [](MoeOptions& o) { o.swiglu_alpha = 2; },
       [](const MoeOptions& o) { return o.activation == Activation::kSwigluOai; }},
      {"static_headroom", [](MoeOptions& o) { o.static_headroom = 4; },
       [](const MoeOptions& o) { return o.activation_scale == ActivationScale::kStatic; }},
      {"intermediate_fixed", [](MoeOptions& o) { o.intermediate_fixed = 0.5f; },
       [](const MoeOptions& o) { return o.intermediate_scale == IntermediateScale::kFixed; }},
      {"activation_scale", [](MoeOptions& o) { o.activation_scale = ActivationScale::kStatic; },
       has_row_scales},
      {"activation_scale", [](MoeOptions& o) { o.activation_scale = ActivationScale::kCompat; },
       has_compat},
      {"intermediate_scale",
       [](MoeOptions& o) { o.intermediate_scale = IntermediateScale::kFixed; }, has_row_scales},
      {"intermediate_scale",
       [](MoeOptions& o) { o.intermediate_scale = IntermediateScale::kCompat; }, has_compat},
  };
  for (int activation = 0; activation < 5; ++activation)
    for (int format = 0; format < 4; ++format)
      for (const bool fixed : {false, true}) {
        MoeOptions base = legal();
        base.activation = static_cast<Activation>(activation);
        if (activation != 0 && activation != 4) base.swiglu_limit = 7.0f;
        base.activation_format = static_cast<ActivationFormat>(format);
        if (fixed && has_row_scales(base)) {
          base.activation_scale = ActivationScale::kStatic;
          base.intermediate_scale = IntermediateScale::kFixed;
        }
        ASSERT_OK(MoeConfig::make(base));
        for (const Rule& rule : rules) {
          MoeOptions o = base;
          rule.change(o);
          const Status status = MoeConfig::make(o).status();
          EXPECT_EQ(status.ok(), rule.legal(o)) << rule.option << ": " << status.message();
          if (!status.ok()) {
            EXPECT_THAT(status.message(), StartsWith(std::string(rule.option) + ": expected "));
          }
        }
      }
}

template <class Enum>
void expect_names(const std::vector<std::string>& names) {
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(to_string(static_cast<Enum>(i)), names[i]);
    const auto value = must(parse<Enum>(names[i]));
    EXPECT_EQ(*value, static_cast<Enum>(i));
  }
  EXPECT_STREQ(to_string(static_cast<Enum>(names.size())), "?");
  const auto wrong = parse<Enum>("SwiGLU");
  ASSERT_FALSE(wrong.ok());
  for (const std::string& name : names) EXPECT_THAT(wrong.status().message(), HasSubstr(name));
  EXPECT_THAT(wrong.status().message(), EndsWith(", got \"SwiGLU\""));
  EXPECT_FALSE(parse<Enum>("").ok());
}

TEST(MoeConfig, NamesGoBothWays) {
  expect_names<Activation>({"swiglu", "swiglu_clamped", "swiglu_step", "swiglu_oai", "relu2"});
  expect_names<ActivationFormat>({"nvfp4", "bf16", "int8_block", "fp8"});
  expect_names<ActivationScale>({"dynamic_token", "static", "compat"});
  expect_names<IntermediateScale>({"dynamic_token", "fixed", "compat"});
  expect_names<RouterWeight>({"after_down", "before_down", "on_input"});
  expect_names<RowFormat>({"bf16", "fp32"});
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
