// Model types with configs that differ from the first families'.
#include "checkpoint/configs.h"
#include "checkpoint/experts.h"
#include "checkpoint/names.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test::families_test {
namespace {

// A type's config beyond the common fields, and what must be read from it: the numbers of the MoE
// layers, the shared experts' size, and a field that the type requires. All have 6 layers and
// 4 experts of 32, in `moe_intermediate_size` unless another field is given for it.
const char* const kTypes = R"([
["afmoe", {"num_dense_layers": 1, "num_shared_experts": 2},
  [1, 2, 3, 4, 5], 64, "num_dense_layers"],
["aria_text", {"intermediate_size": 32, "moe_num_shared_experts": 2},
  [0, 1, 2, 3, 4, 5], 64, "intermediate_size"],
["axk1", {"first_k_dense_replace": 1, "n_shared_experts": 1},
  [1, 2, 3, 4, 5], 32, "first_k_dense_replace"],
["axk2", {"mlp_layer_types": "LISTED", "n_shared_experts": 1}, [1, 3], 32, "mlp_layer_types"],
["bailing_moe", {"first_k_dense_replace": 1, "num_shared_experts": 2},
  [1, 2, 3, 4, 5], 64, "moe_intermediate_size"],
["bailing_moe_v2", {"first_k_dense_replace": 0, "num_shared_experts": 1,
  "moe_shared_expert_intermediate_size": 96}, [0, 1, 2, 3, 4, 5], 96, "num_shared_experts"],
["cohere2_moe", {"intermediate_size": 32, "mlp_layer_types": "LISTED", "num_shared_experts": 1},
  [1, 3], 0, "mlp_layer_types"],
["deepseek_ocr2_text", {"first_k_dense_replace": 1, "n_shared_experts": 2},
  [1, 2, 3, 4, 5], 64, "moe_intermediate_size"],
["dots1", {"first_k_dense_replace": 1, "n_shared_experts": null}, [1, 2, 3, 4, 5], 0, "hidden_act"],
["ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2,
  "moe_num_shared_experts": 2}, [1, 3], 64, "moe_layer_start_index"],
["exaone_moe", {"first_k_dense_replace": 1, "num_shared_experts": 1},
  [1, 2, 3, 4, 5], 32, "moe_intermediate_size"],
["flex_olmo", {"intermediate_size": 32}, [0, 1, 2, 3, 4, 5], 0, "intermediate_size"],
["granitemoe", {"intermediate_size": 32}, [0, 1, 2, 3, 4, 5], 0, "num_experts"],
["granitemoehybrid", {"intermediate_size": 32, "shared_intermediate_size": 48},
  [0, 1, 2, 3, 4, 5], 48, "shared_intermediate_size"],
["hunyuan_v1_moe", {"intermediate_size": 32, "moe_topk": [2, 2, 2, 2, 2, 2]},
  [0, 1, 2, 3, 4, 5], 32, "intermediate_size"],
["hunyuan_v1_moe", {"moe_intermediate_size": 32, "intermediate_size": 96,
  "num_shared_expert": [2, 2]}, [0, 1, 2, 3, 4, 5], 64, "num_experts"],
["hy_v3", {"mlp_layer_types": "LISTED", "num_shared_experts": 1}, [1, 3], 32, "num_shared_experts"],
["hy_v4", {"mlp_layer_types": "LISTED", "swiglu_limit": 10.0}, [1, 3], 0, "swiglu_limit"],
["inkling_text", {"mlp_layer_types": "LISTED"}, [1, 3], 0, "mlp_layer_types"],
["jamba", {"intermediate_size": 32, "expert_layer_period": 2, "expert_layer_offset": 1},
  [1, 3, 5], 0, "expert_layer_offset"],
["laguna", {"mlp_layer_types": "LISTED", "shared_expert_intermediate_size": 80},
  [1, 3], 80, "moe_intermediate_size"],
["lfm2_moe", {"num_dense_layers": 2, "hidden_act": null}, [2, 3, 4, 5], 0, "num_dense_layers"],
["longcat_flash", {"expert_ffn_hidden_size": 32, "num_layers": 3}, [0, 1, 2], 0, "num_layers"],
["mellum", {}, [0, 1, 2, 3, 4, 5], 0, "moe_intermediate_size"],
["mimo_v2_flash", {"moe_layer_freq": [0, 1, 1, 0, 0, 1]}, [1, 2, 5], 0, "moe_layer_freq"],
["minimax", {"intermediate_size": 32}, [0, 1, 2, 3, 4, 5], 0, "intermediate_size"],
["mistral4", {"first_k_dense_replace": 0, "n_shared_experts": 1},
  [0, 1, 2, 3, 4, 5], 32, "n_shared_experts"],
["olmoe", {"intermediate_size": 32}, [0, 1, 2, 3, 4, 5], 0, "intermediate_size"],
["openai_privacy_filter", {"intermediate_size": 32}, [0, 1, 2, 3, 4, 5], 0, "intermediate_size"],
["phimoe", {"intermediate_size": 32}, [0, 1, 2, 3, 4, 5], 0, "intermediate_size"],
["qwen4_exp_text", {"shared_expert_intermediate_size": 80},
  [0, 1, 2, 3, 4, 5], 80, "shared_expert_intermediate_size"],
["solar_open", {"n_shared_experts": 1}, [0, 1, 2, 3, 4, 5], 32, "n_shared_experts"],
["step3p5", {"moe_layers_enum": "3,4,5"}, [3, 4, 5], 0, "moe_layers_enum"],
["step3p5", {"moe_layers_enum": [3, 5]}, [3, 5], 0, "moe_layers_enum"],
["step5", {"moe_layer_list": [3, 4]}, [3, 4], 0, "moe_layer_list"],
["deepseek_v41_text", {"n_shared_experts": 1, "swiglu_limit": 10.0, "routed_scaling_factor": 1.5},
  [0, 1, 2, 3, 4, 5], 32, "routed_scaling_factor"],
["bailing_hybrid", {"mlp_layer_types": "LISTED", "num_shared_experts": 1}, [1, 3], 32,
  "mlp_layer_types"],
["beam", {"mlp_layer_types": "LISTED"}, [1, 3], 0, "mlp_layer_types"],
["dots3_note", {"first_k_dense_replace": 1, "n_shared_experts": 1,
  "moe_shared_expert_intermediate_size": 48}, [1, 2, 3, 4, 5], 48, "n_shared_experts"],
["flint", {"mlp_only_layers": [0, 1], "shared_expert_intermediate_size": 80}, [2, 3, 4, 5], 80,
  "shared_expert_intermediate_size"],
["hy_v4_vl_text", {"mlp_layer_types": "LISTED", "swiglu_limit": 10.0}, [1, 3], 0, "swiglu_limit"],
["kolibri1", {"shared_expert_intermediate_size": 80}, [0, 1, 2, 3, 4, 5], 80, "hidden_act"],
["lara_mini", {"shared_expert_intermediate_size": 80}, [0, 1, 2, 3, 4, 5], 80, "hidden_act"],
["mistral_large4_text", {"first_k_dense_replace": 1, "n_shared_experts": 1}, [1, 2, 3, 4, 5], 32,
  "first_k_dense_replace"],
["sarvam_moe", {"first_k_dense_replace": 1, "num_shared_experts": 1}, [1, 2, 3, 4, 5], 32,
  "num_shared_experts"],
["unlimited_ocr_text", {"first_k_dense_replace": 1, "n_shared_experts": 2}, [1, 2, 3, 4, 5], 64,
  "n_shared_experts"],
["gemma4_text", {"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh",
  "enable_moe_block": true, "num_experts_per_tok": null, "top_k_experts": 2},
  [0, 1, 2, 3, 4, 5], 0, "hidden_activation"],
["gemma4", {"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh",
  "num_experts_per_tok": null, "top_k_experts": 2}, [0, 1, 2, 3, 4, 5], 0, "top_k_experts"],
["diffusion_gemma", {"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh",
  "num_experts_per_tok": null, "top_k_experts": 2}, [0, 1, 2, 3, 4, 5], 0, "top_k_experts"],
["inkling2_text", {"mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0}, [0, 1, 2, 3, 4, 5], 0,
  "mlp_up_softcap"],
["kimi_linear", {"hidden_act": "situ", "activation_situ_beta": 4.0,
  "activation_situ_linear_beta": 25.0, "first_k_dense_replace": 1, "num_shared_experts": 1},
  [1, 2, 3, 4, 5], 32, "activation_situ_linear_beta"],
["zaya", {"num_experts_per_tok": 1}, [0, 1, 2, 3, 4, 5], 0, "num_experts_per_tok"]
])";

json family_config(const std::string& type, const json& more) {
  json config = {{"model_type", type},   {"hidden_size", 64}, {"num_hidden_layers", 6},
                 {"hidden_act", "silu"}, {"num_experts", 4},  {"num_experts_per_tok", 2}};
  const bool plain = more.contains("intermediate_size") || more.contains("expert_ffn_hidden_size");
  if (!plain) config["moe_intermediate_size"] = 32;
  config.update(more);
  if (config.value("mlp_layer_types", json()) == "LISTED")
    config["mlp_layer_types"] = {"dense", "sparse", "dense", "sparse", "dense", "dense"};
  return config;
}

TEST(Families, ConfigsAreReadAndMissingFieldsNamed) {
  for (const json& type : json::parse(kTypes)) {
    SCOPED_TRACE(type.dump());
    json config = family_config(type[0], type[1]);
    const auto model = must(parsed(config));
    EXPECT_EQ(model->model_type, type[0].get<std::string>());
    EXPECT_EQ(model->layers, type[2].get<std::vector<int64_t>>());
    EXPECT_EQ(model->options.num_experts, 4);
    EXPECT_EQ(model->options.intermediate_size, 32);
    EXPECT_EQ(model->options.shared_intermediate_size, type[3]);
    EXPECT_EQ(model->options.top_k, type[0] == "zaya" ? 1 : 2);
    config.erase(type[4].get<std::string>());
    EXPECT_THAT(parsed(config), Refused(Code::kBadInput, "missing, and"));
  }
}

TEST(Families, GeluAndSituAreReadFromTheirFields) {
  const auto gemma = [](const char* act, const json& more = json::object()) {
    json config = family_config("gemma4_text", {{"hidden_activation", act}});
    config.erase("hidden_act");
    config.update(more);
    return parsed(config);
  };
  EXPECT_EQ(must(gemma("gelu_pytorch_tanh"))->options.activation, Activation::kGeluTanh);
  EXPECT_EQ(must(gemma("gelu"))->options.activation, Activation::kGelu);
  EXPECT_THAT(gemma("silu"), Refused(Code::kUnsupported, "expected gelu_pytorch_tanh or gelu"));
  EXPECT_THAT(gemma("gelu", {{"enable_moe_block", false}}),
              Refused(Code::kUnsupported, "the model has no experts"));
  const json inkling = {{"mlp_gate_softcap", 3.5}, {"mlp_up_softcap", 20}};
  const MoeOptions caps = must(parsed(family_config("inkling2_text", inkling)))->options;
  EXPECT_EQ(caps.activation, Activation::kSitu);
  EXPECT_EQ(caps.situ_gate_limit, 3.5f);
  EXPECT_EQ(caps.situ_up_limit, 20.0f);
  const json kimi = {{"first_k_dense_replace", 0}, {"n_shared_experts", 0}};
  json config = family_config("kimi_linear", kimi);
  EXPECT_EQ(must(parsed(config))->options.activation, Activation::kSwiglu);
  config["activation_situ_beta"] = 4.0;
  EXPECT_THAT(parsed(config), Refused(Code::kUnsupported, "with hidden_act situ only"));
  config["activation_situ_linear_beta"] = 25.0;
  config["hidden_act"] = "situ";
  EXPECT_EQ(must(parsed(config))->options.situ_gate_limit, 4.0f);
  EXPECT_EQ(must(parsed(config))->options.situ_up_limit, 25.0f);
}

// Tencent's files call it shared_mlp, and exports of transformers' modules shared_experts.
TEST(Families, HunyuanV3sSharedExpertHasTwoNames) {
  CheckpointBuilder plain({.model_type = "deepseek_v3"});
  const Opened expected(plain);
  const auto renamed = [](const char* to, const char* only) {
    CheckpointBuilder builder({.model_type = "deepseek_v3"});
    builder.config()["model_type"] = "hy_v3";
    const std::string from = "shared_experts";
    const auto copy = builder.tensors();
    for (const auto& [name, tensor] : copy) {
      const size_t at = name.find(from);
      if (at == name.npos || name.find(only) == name.npos) continue;
      auto node = builder.tensors().extract(name);
      node.key() = std::string(name).replace(at, from.size(), to);
      builder.tensors().insert(std::move(node));
    }
    return builder;
  };
  for (const char* name : {"shared_mlp", "shared_experts"}) {
    const Opened opened(renamed(name, ""));
    for (const int64_t layer : plain.layers())
      expect_same(opened->shared_expert(layer), expected->shared_expert(layer));
  }
  const Opened both(renamed("shared_mlp", "up_proj"));
  EXPECT_NE(find(both->findings(), "shared_expert_not_loaded"), nullptr);
}

TEST(Families, OneNumberForAllLayersMayBeAList) {
  json config = family_config("hunyuan_v1_moe", {{"intermediate_size", 32}});
  config["num_experts"] = {4, 4, 4, 4, 4, 4};
  ASSERT_OK(parsed(config));
  config["num_experts"] = {4, 4, 8, 4, 4, 4};
  EXPECT_THAT(parsed(config),
              Refused(Code::kUnsupported, "num_experts: expected one number for all layers"));
}

ATTACK_TEST(kHostileFiles, Families, HostileListsOfLayersAndLimits) {
  const auto refused = [](const char* key, const json& bad) {
    json config = family_config("step3p5", {{"moe_layers_enum", "3"}});
    config[key] = bad;
    EXPECT_THAT(parsed(config), Refused(Code::kBadInput, key)) << bad;
    attacked();
  };
  for (const json& bad :
       {json("3,,4"), json("3;4"), json("a"), json("-1"), json("99999999"), json("]"),
        json("3],[4"), json(3), json(true), json::object(), json({"3", 4}), json({2.5, 3})})
    refused("moe_layers_enum", bad);
  for (const json& bad :
       {json(7.0), json({7.0, 7.0}), json::array(), json({0, 0, 0, -1, 0, 0}),
        json({0, 0, 0, "7", 0, 0}), json({0, 0, 0, 1e300, 0, 0}), json({0, 0, 0, {7}, 0, 0})})
    refused("swiglu_limits", bad);
  const json good = {{"moe_layers_enum", "3"}, {"swiglu_limits", {nullptr, 0, 0.0, 7, 16.5, 0}}};
  EXPECT_EQ(parsed(family_config("step3p5", good))->swiglu_limits,
            (std::map<int64_t, float>{{3, 7.0f}, {4, 16.5f}}));
  const json beyond = {
      {"intermediate_size", 32}, {"expert_layer_period", 2}, {"expert_layer_offset", 2}};
  EXPECT_THAT(parsed(family_config("jamba", beyond)).status().message(),
              HasSubstr("expert_layer_offset: expected an integer in [0, 1], got 2"));
}

TEST(Families, ExpertsMayComeAfterAProjection) {
  const json config = family_config(
      "kimi_linear",
      {{"first_k_dense_replace", 1}, {"num_shared_experts", 2}, {"routed_expert_hidden_size", 48}});
  const auto model = must(parsed(config));
  EXPECT_EQ(model->options.hidden_size, 48);
  EXPECT_EQ(model->model_hidden_size, 64);
  EXPECT_THAT(parsed(family_config("mellum", {{"routed_expert_hidden_size", 48}})),
              Refused(Code::kUnsupported, "experts after a projection"));
}

TEST(Families, ABetaOtherThanOneIsNotTheActivation) {
  json config = family_config("minimax_m3", {{"intermediate_size", 32},
                                             {"hidden_act", "swigluoai"},
                                             {"swiglu_limit", 7.0},
                                             {"swiglu_alpha", 1.702},
                                             {"swiglu_beta", 1.0}});
  ASSERT_OK(parsed(config));
  config["swiglu_beta"] = 0.5;
  EXPECT_THAT(parsed(config), Refused(Code::kUnsupported, "swiglu_beta: expected 1"));
}

// Mistral Large 4 has its experts in the layer, without a module around them.
TEST(Families, ExpertsMayBeInTheLayerItself) {
  const FamilyNames& family = *family_names("mistral_large");
  const auto expert = parse_moe_tensor_name(family, "layers.3.experts.7.w3.weight");
  ASSERT_TRUE(expert);
  EXPECT_EQ(expert->stem, "layers.3.experts");
  EXPECT_EQ(expert->expert, 7);
  EXPECT_EQ(expert->projection, Projection::kUp);
  const auto shared = parse_moe_tensor_name(family, "layers.3.shared_experts.w2.weight");
  ASSERT_TRUE(shared);
  EXPECT_EQ(shared->role, TensorRole::kShared);
  EXPECT_TRUE(parse_moe_tensor_name(family, "model.layers.3.mlp.experts.7.up_proj.weight"));
  EXPECT_TRUE(experts_module(family, "layers.3.experts.7.w3.lora_A"));
  for (const char* name : {"layers.3.attention.wq.weight", "layers.3.gate.weight",
                           "layers.3.feed_forward.w1.weight"}) {
    EXPECT_FALSE(parse_moe_tensor_name(family, name)) << name;
    EXPECT_FALSE(experts_module(family, name)) << name;
  }
}

TEST(Families, ADeclinedTypeSaysWhy) {
  const std::pair<const char*, const char*> declined[] = {
      {"dbrx", "rows of one matrix"},
      {"doge", "rows of an embedding"},
      {"ernie4_5_vl_moe", "two sets"},
      {"jetmoe", "adds a bias"},
      {"nllb-moe", "relu and no gate"},
      {"switch_transformers", "no gate"},
      {"muse_spark_text", "normalized before its router weight"},
  };
  for (const auto& [type, words] : declined) {
    const auto model = parsed(family_config(type, {{"intermediate_size", 32}}));
    EXPECT_THAT(model, Refused(Code::kUnsupported, words));
  }
  json laguna = family_config(
      "laguna", {{"mlp_layer_types", "LISTED"}, {"shared_expert_intermediate_size", 0}});
  EXPECT_OK(parsed(laguna));
  laguna["moe_apply_router_weight_on_input"] = true;
  EXPECT_THAT(parsed(laguna).status().message(), HasSubstr("moe_apply_router_weight_on_input"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::families_test
