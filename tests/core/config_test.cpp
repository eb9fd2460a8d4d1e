// MoeConfig::make: every combination of named choices is made or refused by the contract, and
// the error for every illegal value names it with the expected and the actual value.
#include "core/config.h"

#include <functional>
#include <limits>

#include "support/sizes.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

MoeOptions legal() { return sizes_of(8, 2, 64, 48); }

// Gives the activation the limits that it needs.
void set_limits(MoeOptions& o) {
  const bool swiglu = o.activation == Activation::kSwigluClamped ||
                      o.activation == Activation::kSwigluStep ||
                      o.activation == Activation::kSwigluOai;
  if (swiglu) o.swiglu_limit = 7.0f;
  if (o.activation == Activation::kSitu) o.situ_gate_limit = 4.0f, o.situ_up_limit = 25.0f;
}

TEST(MoeConfig, RefusesWithExpectedAndActual) {
  const auto limited = [](Activation activation, std::optional<float> limit) {
    return [=](MoeOptions& o) { o.activation = activation, o.swiglu_limit = limit; };
  };
  const auto situ = [](std::optional<float> gate, std::optional<float> up) {
    return [=](MoeOptions& o) {
      o.activation = Activation::kSitu, o.situ_gate_limit = gate, o.situ_up_limit = up;
    };
  };
  const std::string size = "_size: expected a positive multiple of 16 up to 1048576, got ";
  const struct {
    std::string message;
    std::function<void(MoeOptions&)> change;
  } refusals[] = {
      {"num_experts: expected 1..65536, got 0", [](MoeOptions& o) { o.num_experts = 0; }},
      {"num_experts: expected 1..65536, got 65537", [](MoeOptions& o) { o.num_experts = 65537; }},
      {"top_k: expected 1..8, got 0", [](MoeOptions& o) { o.top_k = 0; }},
      {"top_k: expected 1..8, got 9", [](MoeOptions& o) { o.top_k = 9; }},
      {"hidden" + size + "0", [](MoeOptions& o) { o.hidden_size = 0; }},
      {"hidden" + size + "72", [](MoeOptions& o) { o.hidden_size = 72; }},
      {"hidden" + size + "-16", [](MoeOptions& o) { o.hidden_size = -16; }},
      {"intermediate" + size + "9223372036854775792",
       [](MoeOptions& o) { o.intermediate_size = std::numeric_limits<int64_t>::max() - 15; }},
      {"shared_intermediate" + size + "8", [](MoeOptions& o) { o.shared_intermediate_size = 8; }},
      {"activation: expected one of swiglu, swiglu_clamped, swiglu_step, swiglu_oai, relu2, gelu, "
       "gelu_tanh, situ, got 8",
       [](MoeOptions& o) { o.activation = static_cast<Activation>(8); }},
      {"activation_format: expected one of nvfp4, bf16, int8_block, fp8, got 200",
       [](MoeOptions& o) { o.activation_format = static_cast<ActivationFormat>(200); }},
      {"activation_scale: expected one of dynamic_token, static, vllm_order, got 3",
       [](MoeOptions& o) { o.activation_scale = static_cast<ActivationScale>(3); }},
      {"intermediate_scale: expected one of dynamic_token, fixed, vllm_order, got 3",
       [](MoeOptions& o) { o.intermediate_scale = static_cast<IntermediateScale>(3); }},
      {"router_weight: expected one of after_down, before_down, on_input, got 3",
       [](MoeOptions& o) { o.router_weight = static_cast<RouterWeight>(3); }},
      {"top_k: expected 1 with router_weight on_input (hidden times one expert's weight), got 2",
       [](MoeOptions& o) { o.router_weight = RouterWeight::kOnInput; }},
      {"row_format: expected one of bf16, fp32, got 2",
       [](MoeOptions& o) { o.row_format = static_cast<RowFormat>(2); }},
      {"swiglu_limit: expected none with activation swiglu, got 7",
       limited(Activation::kSwiglu, 7.0f)},
      {"swiglu_limit: expected none with activation relu2, got 7",
       limited(Activation::kRelu2, 7.0f)},
      {"swiglu_limit: expected none with activation gelu, got 7", limited(Activation::kGelu, 7.0f)},
      {"swiglu_limit: expected none with activation situ, got 7", limited(Activation::kSitu, 7.0f)},
      {"situ_gate_limit: expected a limit with activation situ, got none", situ({}, 25.0f)},
      {"situ_up_limit: expected a limit with activation situ, got none", situ(4.0f, {})},
      {"situ_gate_limit: expected finite and > 0, got 0", situ(0.0f, 25.0f)},
      {"situ_up_limit: expected finite and > 0, got -25", situ(4.0f, -25.0f)},
      {"situ_up_limit: expected finite and > 0, got inf", situ(4.0f, kInf)},
      {"situ_gate_limit: expected finite and > 0, got nan", situ(kNan, 25.0f)},
      {"situ_up_limit: expected none with activation swiglu, got 25",
       [](MoeOptions& o) { o.situ_up_limit = 25.0f; }},
      {"swiglu_limit: expected a limit with activation swiglu_clamped, got none",
       limited(Activation::kSwigluClamped, {})},
      {"swiglu_limit: expected a limit with activation swiglu_step, got none",
       limited(Activation::kSwigluStep, {})},
      {"swiglu_limit: expected a limit with activation swiglu_oai, got none",
       limited(Activation::kSwigluOai, {})},
      {"swiglu_limit: expected finite and > 0, got -1", limited(Activation::kSwigluOai, -1.0f)},
      {"swiglu_limit: expected finite and > 0, got inf", limited(Activation::kSwigluStep, kInf)},
      {"swiglu_alpha: expected finite and > 0, got nan",
       [](MoeOptions& o) { o.swiglu_alpha = kNan; }},
      {"swiglu_alpha: expected none (1.702) with activation swiglu, got 2",
       [](MoeOptions& o) { o.swiglu_alpha = 2; }},
      {"static_headroom: expected none (1) with activation_scale dynamic_token, got 16",
       [](MoeOptions& o) { o.static_headroom = 16; }},
      {"static_headroom: expected a power of two in [2^-126, 2^127], got 3",
       [](MoeOptions& o) { o.static_headroom = 3.0f; }},
      {"static_headroom: expected a power of two in [2^-126, 2^127], got -2",
       [](MoeOptions& o) { o.static_headroom = -2.0f; }},
      {"intermediate_fixed: expected none with intermediate_scale dynamic_token, got 0.5",
       [](MoeOptions& o) { o.intermediate_fixed = 0.5f; }},
      {"intermediate_fixed: expected a power of two in [2^-126, 2^127], got 0.300000012",
       [](MoeOptions& o) {
         o.intermediate_scale = IntermediateScale::kFixed;
         o.intermediate_fixed = 0.3f;
       }},
      {"intermediate_scale: expected dynamic_token with activation_format int8_block (each block "
       "of 16 has its own scale), got vllm_order",
       [](MoeOptions& o) {
         o.activation_format = ActivationFormat::kInt8Block;
         o.intermediate_scale = IntermediateScale::kVllmOrder;
       }},
      {"activation_scale: expected dynamic_token or static with activation_format fp8 (vllm_order "
       "is "
       "an order of operations for NVFP4), got vllm_order",
       [](MoeOptions& o) {
         o.activation_format = ActivationFormat::kFp8;
         o.activation_scale = ActivationScale::kVllmOrder;
       }},
      {"router_weight: expected after_down with expert_biases (the weight multiplies the down bias "
       "too), got before_down",
       [](MoeOptions& o) {
         o.expert_biases = true;
         o.router_weight = RouterWeight::kBeforeDown;
       }},
      {"max_router_weight: expected finite and > 0, got 0",
       [](MoeOptions& o) { o.max_router_weight = 0.0f; }},
  };
  for (const auto& [message, change] : refusals) {
    MoeOptions o = legal();
    change(o);
    const Status status = MoeConfig::make(o).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << message;
    EXPECT_EQ(status.message(), message);
  }
}

// docs/explanation/numerics.md, section 2: options that a layer would not use are refused, and all
// others are taken.
TEST(MoeConfig, OptionsThatNothingUsesAreRefused) {
  const auto has_vllm_order = [](const MoeOptions& o) {
    return o.activation_format == ActivationFormat::kNvfp4 ||
           o.activation_format == ActivationFormat::kBf16;
  };
  const auto has_row_scales = [](const MoeOptions& o) {
    return o.activation_format != ActivationFormat::kInt8Block;
  };
  const struct {
    const char* option;
    std::function<void(MoeOptions&)> change;
    std::function<bool(const MoeOptions&)> legal;
  } rules[] = {
      {"swiglu_alpha", [](MoeOptions& o) { o.swiglu_alpha = 2; },
       [](const MoeOptions& o) { return o.activation == Activation::kSwigluOai; }},
      {"situ_gate_limit", [](MoeOptions& o) { o.situ_gate_limit = 4.0f; },
       [](const MoeOptions& o) { return o.activation == Activation::kSitu; }},
      {"static_headroom", [](MoeOptions& o) { o.static_headroom = 4; },
       [](const MoeOptions& o) { return o.activation_scale == ActivationScale::kStatic; }},
      {"intermediate_fixed", [](MoeOptions& o) { o.intermediate_fixed = 0.5f; },
       [](const MoeOptions& o) { return o.intermediate_scale == IntermediateScale::kFixed; }},
      {"activation_scale", [](MoeOptions& o) { o.activation_scale = ActivationScale::kStatic; },
       has_row_scales},
      {"activation_scale", [](MoeOptions& o) { o.activation_scale = ActivationScale::kVllmOrder; },
       has_vllm_order},
      {"intermediate_scale",
       [](MoeOptions& o) { o.intermediate_scale = IntermediateScale::kFixed; }, has_row_scales},
      {"intermediate_scale",
       [](MoeOptions& o) { o.intermediate_scale = IntermediateScale::kVllmOrder; }, has_vllm_order},
      {"router_weight",
       [](MoeOptions& o) { o.router_weight = RouterWeight::kOnInput, o.top_k = 1; },
       [](const MoeOptions& o) { return !o.expert_biases; }},
  };
  for (int activation = 0; activation < 8; ++activation)
    for (int format = 0; format < 4; ++format)
      for (const bool fixed : {false, true}) {
        MoeOptions base = legal();
        base.activation = static_cast<Activation>(activation);
        set_limits(base);
        base.activation_format = static_cast<ActivationFormat>(format);
        base.expert_biases = fixed;
        if (fixed && has_row_scales(base)) {
          base.activation_scale = ActivationScale::kStatic;
          base.intermediate_scale = IntermediateScale::kFixed;
        }
        ASSERT_EQ(must(MoeConfig::make(base))->options(), base);
        for (const auto& rule : rules) {
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
    EXPECT_EQ(*must(parse<Enum>(names[i])), static_cast<Enum>(i));
  }
  EXPECT_STREQ(to_string(static_cast<Enum>(names.size())), "?");
  const Status wrong = parse<Enum>("SwiGLU").status();
  for (const std::string& name : names) EXPECT_THAT(wrong.message(), HasSubstr(name));
  EXPECT_THAT(wrong.message(), EndsWith(", got \"SwiGLU\""));
  EXPECT_FALSE(parse<Enum>("").ok());
}

TEST(MoeConfig, NamesGoBothWays) {
  expect_names<Activation>({"swiglu", "swiglu_clamped", "swiglu_step", "swiglu_oai", "relu2",
                            "gelu", "gelu_tanh", "situ"});
  expect_names<ActivationFormat>({"nvfp4", "bf16", "int8_block", "fp8"});
  expect_names<ActivationScale>({"dynamic_token", "static", "vllm_order"});
  expect_names<IntermediateScale>({"dynamic_token", "fixed", "vllm_order"});
  expect_names<RouterWeight>({"after_down", "before_down", "on_input"});
  expect_names<RowFormat>({"bf16", "fp32"});
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
