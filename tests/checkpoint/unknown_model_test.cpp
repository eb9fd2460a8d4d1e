// A model type that is not known: what the error advises, and reading it by the caller's choice.
#include "checkpoint/unknown_model.h"

#include "checkpoint/configs.h"
#include "checkpoint/experts.h"
#include "nvfp4_moe/nvfp4_moe.hpp"
#include "support/attack.h"

namespace nvfp4_moe::internal::test::unknown_model_test {
namespace {

// A checkpoint of a known model type under a name that is not known.
CheckpointBuilder unknown(const char* like, const char* patch = "{}",
                          SourceFormat format = SourceFormat::kModelOpt) {
  CheckpointBuilder builder({.model_type = like, .format = format});
  builder.config()["model_type"] = "some_new_moe";
  builder.config().merge_patch(json::parse(patch));
  return builder;
}

std::string advice(CheckpointBuilder builder) {
  const Status status = refusal_of_open(builder);
  EXPECT_EQ(status.code(), Code::kUnsupported) << status.message();
  EXPECT_THAT(status.message(), HasSubstr("model_type 'some_new_moe' is not known"));
  return status.message();
}

TEST(UnknownModel, TheErrorSaysHowTheFilesRead) {
  EXPECT_THAT(advice(unknown("qwen3_moe")),
              AllOf(HasSubstr("its files read as --family qwen3_moe (2 layers of 8 experts, top_k "
                              "2, hidden 64, intermediate 32, swiglu, router weight after_down, no "
                              "shared expert, "),
                    HasSubstr("model.layers.0.mlp.experts.0.gate_proj.weight")));
  EXPECT_THAT(
      advice(unknown("deepseek_v3")),
      AllOf(HasSubstr("its files read as --family deepseek_v2 "), HasSubstr("shared expert 32")));
  EXPECT_THAT(
      advice(unknown("minimax_m3", R"({"text_config": {"model_type": "some_new_moe"}})")),
      AllOf(HasSubstr("--family minimax_m3 "), HasSubstr("swiglu_oai, limit 7, alpha 1.7")));
}

TEST(UnknownModel, TheChosenRulesReadTheSameExperts) {
  for (const SourceFormat format :
       {SourceFormat::kModelOpt, SourceFormat::kMxfp4, SourceFormat::kFloat}) {
    CheckpointBuilder plain({.model_type = "deepseek_v3", .format = format});
    const Opened expected(plain);
    for (const char* family : {"deepseek_v3", "glm4_moe"}) {
      const Opened chosen(unknown("deepseek_v3", "{}", format), {.family = family});
      for (const int64_t layer : plain.layers())
        for (int64_t e = 0; e < 8; ++e)
          expect_same(chosen->expert(layer, e), expected->expert(layer, e));
      EXPECT_EQ(chosen->model().read_as, family);
      EXPECT_EQ(chosen->model().model_type, "some_new_moe");
      const Finding* finding = find(chosen->findings(), "read_as_family");
      ASSERT_NE(finding, nullptr);
      EXPECT_EQ(finding->severity, Severity::kWarning);
      EXPECT_THAT(finding->actual, HasSubstr(std::string("which is read as ") + family));
    }
  }
}

// The number of readings of all names does not grow with the number of known model types.
TEST(UnknownModel, RulesThatReadTheSameAreTriedOnce) {
  const auto scans = [](CheckpointBuilder builder) {
    TempDir dir;
    EXPECT_OK(builder.write(dir.path().string()));
    const TensorIndex index = *must(TensorIndex::open(dir.path().string()));
    const ParsedConfigs files = *must(parse_config_files(builder.config().dump(), ""));
    const Advice advice = advise_family(index, files);
    EXPECT_THAT(advice.text, HasSubstr("its files read as --family "));
    return advice.scans;
  };
  EXPECT_GE(model_rows().size(), 90u);
  EXPECT_LE(scans(unknown("deepseek_v3")), 16);
  EXPECT_LE(scans(unknown("qwen3_moe")), 8);
}

// A clamp before or after the router weight: two rules fit, and neither is taken.
TEST(UnknownModel, TwoWaysToReadAreListedAndNotChosen) {
  const char* both = R"({"swiglu_limit": 10.0, "routed_scaling_factor": 1.5, "n_shared_experts": 0,
                         "first_k_dense_replace": 0})";
  EXPECT_THAT(advice(unknown("qwen3_moe", both)),
              AllOf(HasSubstr("may be read as --family deepseek_v4 "),
                    HasSubstr("router weight before_down"), HasSubstr(" or --family glm5_next"),
                    HasSubstr("router weight after_down")));
  const Opened chosen(unknown("qwen3_moe", both), {.family = "glm5_next"});
  EXPECT_EQ(chosen->model().options.activation, Activation::kSwigluClamped);
  EXPECT_EQ(chosen->model().options.swiglu_limit, 10.0f);
}

TEST(UnknownModel, TheOrderOfGateAndUpMustBeGivenToo) {
  CheckpointBuilder builder = unknown("qwen3_moe"), plain({.model_type = "qwen3_moe"});
  stack_experts(builder, GateUpOrder::kUpFirst);
  EXPECT_THAT(advice(builder), HasSubstr("--family qwen3_moe with --gate-up-order"));
  const Opened open(builder, {.family = "qwen3_moe"});
  EXPECT_THAT(open->expert(0, 0), Refused(Code::kUnsupported, "a model type that is not known"));
  const Opened expected(plain);
  const Opened given(builder, {.family = "qwen3_moe", .gate_up_order = GateUpOrder::kUpFirst});
  for (int64_t e = 0; e < 8; ++e) expect_same(given->expert(0, e), expected->expert(0, e));
}

ATTACK_TEST(kHostileFiles, UnknownModel, WhatMayMeanTwoThingsIsRefusedByName) {
  const struct {
    const char *patch, *family, *words;
  } cases[] = {
      {R"({"swiglu_limit": 7.0})", "qwen3_moe", "swiglu_limit"},
      {R"({"swiglu_beta": 1.5})", "qwen3_moe", "swiglu_beta: may change what the experts"},
      {R"({"activation_situ_beta": 4})", "qwen3_moe", "activation_situ_beta: may change"},
      {R"({"moe_act_clamp": 8})", "lfm2_moe", "moe_act_clamp: may change"},
      {R"({"expert_softcap": 8})", "qwen3_moe", "expert_softcap: may change"},
      {R"({"moe_hidden_size": 32})", "qwen3_moe", "moe_hidden_size: may change"},
      {R"({"post_expert_norm": true})", "qwen3_moe", "post_expert_norm: may change"},
      {R"({"mlp_hidden_act": "relu2"})", "qwen3_moe", "mlp_hidden_act: 'relu2' may be"},
      {R"({"hidden_act": "gelu"})", "qwen3_moe", "hidden_act: 'gelu' may be"},
      {R"({"hidden_act": null})", "qwen3_moe", "hidden_act: missing"},
      {R"({"moe_apply_router_weight_on_input": true})", "qwen3_moe", "weight_on_input"},
  };
  for (const auto& [patch, family, words] : cases) {
    SCOPED_TRACE(patch);
    json config = config_of("qwen3_moe", patch);
    config["model_type"] = "some_new_moe";
    EXPECT_THAT(
        parse_model_config(config.dump(), "", family),
        Refused(words == std::string("hidden_act: missing") ? Code::kBadInput : Code::kUnsupported,
                words));
    attacked();
  }
  for (const char* harmless :
       {R"({"final_logit_softcapping": 30})", R"({"swiglu_limit": null})",
        R"({"attn_logit_softcapping": 50})", R"({"mamba_hidden_act": "gelu"})"}) {
    json config = config_of("qwen3_moe", harmless);
    config["model_type"] = "some_new_moe";
    SCOPED_TRACE(harmless);
    EXPECT_OK(parse_model_config(config.dump(), "", "qwen3_moe"));
  }
}

TEST(UnknownModel, WhatNoRuleReadsSaysWhy) {
  EXPECT_THAT(advice(unknown("qwen3_moe", R"({"hidden_act": "gelu"})")),
              AllOf(HasSubstr("no known family reads its files; as "), HasSubstr("'gelu'")));
  CheckpointBuilder elsewhere = unknown("qwen3_moe");
  auto& tensors = elsewhere.tensors();
  auto node = tensors.extract("model.layers.0.mlp.experts.0.gate_proj.weight_scale_2");
  node.key() = "model.layers.0.mlp.experts.0.gate_proj.weight_norm";
  tensors.insert(std::move(node));
  EXPECT_THAT(advice(elsewhere), HasSubstr("no known family reads its files"));
  // A shared expert that only a rule without one leaves out.
  EXPECT_THAT(advice(unknown("deepseek_v3", R"({"n_shared_experts": 0})")),
              HasSubstr("no known family reads its files"));
}

TEST(UnknownModel, AKnownModelTypeIsReadAsItself) {
  const auto status = [](const json& config, const char* family) {
    return parse_model_config(config.dump(), "", family).status();
  };
  const json known = config_of("qwen3_moe");
  EXPECT_OK(status(known, "qwen3_moe"));
  EXPECT_OK(status(known, "qwen"));
  EXPECT_TRUE(must(parse_model_config(known.dump(), "", "qwen"))->findings.empty());
  EXPECT_THAT(status(known, "mixtral"),
              Refused(Code::kInvalidArgument, "family: expected none, since config.json"));
  EXPECT_THAT(status(config_of("qwen3_moe", R"({"model_type": "muse_spark"})"), "kimi_k2"),
              Refused(Code::kUnsupported, "normalized before its router weight"));
  EXPECT_OK(status(config_of("qwen3_moe", R"({"model_type": null})"), "qwen3_moe"));
  const json other = config_of("qwen3_moe", R"({"model_type": "some_new_moe"})");
  EXPECT_THAT(status(other, "glm"), Refused(Code::kInvalidArgument, "glm5_next"));
  EXPECT_THAT(status(other, "nothing"),
              Refused(Code::kInvalidArgument, "expected a known model type or family"));
}

TEST(UnknownModel, IsGivenThroughTheCInterface) {
  CheckpointBuilder builder = unknown("qwen3_moe");
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  auto options = nvfp4_moe::make<nvfp4_moe_checkpoint_options>();
  EXPECT_THROW(nvfp4_moe::Checkpoint(dir.path().string(), options), nvfp4_moe::Error);
  options.family = "qwen3_moe";
  const nvfp4_moe::Checkpoint checkpoint(dir.path().string(), options);
  EXPECT_THAT(checkpoint.findings(), HasSubstr("read_as_family"));
  EXPECT_EQ(checkpoint.config(0).num_experts, 8);
  options.struct_size = offsetof(nvfp4_moe_checkpoint_options, family);  // an older caller's
  EXPECT_THROW(nvfp4_moe::Checkpoint(dir.path().string(), options), nvfp4_moe::Error);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::unknown_model_test
