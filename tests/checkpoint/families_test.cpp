// Model types with configs that differ from the first families'.
#include <nlohmann/json.hpp>

#include "checkpoint/model_config.h"
#include "support/attack.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test::families_test {
namespace {

using nlohmann::json;
using Layers = std::vector<int64_t>;

constexpr int64_t kExperts = 4, kHidden = 64, kIntermediate = 32;

Result<ModelInfo> parse(const json& config) { return parse_model_config(config.dump(), ""); }

// Six layers, four experts of 32 under the field named by `size`; `more` has the other fields that
// a type needs.
json config_of(const char* type, const char* size, const json& more) {
  json config = {{"model_type", type},   {"hidden_size", kHidden},  {"num_hidden_layers", 6},
                 {"hidden_act", "silu"}, {"num_experts", kExperts}, {"num_experts_per_tok", 2},
                 {size, kIntermediate}};
  config.update(more);
  return config;
}

struct Type {
  const char* name;
  const char* size;
  json more;
  Layers layers;
  int64_t shared_size;
  const char* needs;  // a required field
};

const std::vector<Type>& types() {
  const Layers all = {0, 1, 2, 3, 4, 5}, after_first = {1, 2, 3, 4, 5};
  const json listed = {"dense", "sparse", "dense", "sparse", "dense", "dense"};
  const char *moe = "moe_intermediate_size", *plain = "intermediate_size";
  static const std::vector<Type> table = {
      {"afmoe",
       moe,
       {{"num_dense_layers", 1}, {"num_shared_experts", 2}},
       after_first,
       64,
       "num_dense_layers"},
      {"aria_text", plain, {{"moe_num_shared_experts", 2}}, all, 64, plain},
      {"axk1",
       moe,
       {{"first_k_dense_replace", 1}, {"n_shared_experts", 1}},
       after_first,
       32,
       "first_k_dense_replace"},
      {"axk2",
       moe,
       {{"mlp_layer_types", listed}, {"n_shared_experts", 1}},
       {1, 3},
       32,
       "mlp_layer_types"},
      {"bailing_moe",
       moe,
       {{"first_k_dense_replace", 1}, {"num_shared_experts", 2}},
       after_first,
       64,
       moe},
      {"bailing_moe_v2",
       moe,
       {{"first_k_dense_replace", 0},
        {"num_shared_experts", 1},
        {"moe_shared_expert_intermediate_size", 96}},
       all,
       96,
       "num_shared_experts"},
      {"cohere2_moe",
       plain,
       {{"mlp_layer_types", listed}, {"num_shared_experts", 1}},
       {1, 3},
       0,
       "mlp_layer_types"},
      {"deepseek_ocr2_text",
       moe,
       {{"first_k_dense_replace", 1}, {"n_shared_experts", 2}},
       after_first,
       64,
       moe},
      {"dots1",
       moe,
       {{"first_k_dense_replace", 1}, {"n_shared_experts", nullptr}},
       after_first,
       0,
       "hidden_act"},
      {"ernie4_5_moe",
       moe,
       {{"moe_layer_start_index", 1},
        {"moe_layer_end_index", 4},
        {"moe_layer_interval", 2},
        {"moe_num_shared_experts", 2}},
       {1, 3},
       64,
       "moe_layer_start_index"},
      {"exaone_moe",
       moe,
       {{"first_k_dense_replace", 1}, {"num_shared_experts", 1}},
       after_first,
       32,
       moe},
      {"flex_olmo", plain, json::object(), all, 0, plain},
      {"granitemoe", plain, json::object(), all, 0, "num_experts"},
      {"granitemoehybrid",
       plain,
       {{"shared_intermediate_size", 48}},
       all,
       48,
       "shared_intermediate_size"},
      {"hunyuan_v1_moe", plain, {{"moe_topk", {2, 2, 2, 2, 2, 2}}}, all, 32, plain},
      {"hunyuan_v1_moe",
       moe,
       {{"intermediate_size", 96}, {"num_shared_expert", {2, 2}}},
       all,
       64,
       "num_experts"},
      {"hy_v3",
       moe,
       {{"mlp_layer_types", listed}, {"num_shared_experts", 1}},
       {1, 3},
       32,
       "num_shared_experts"},
      {"hy_v4",
       moe,
       {{"mlp_layer_types", listed}, {"swiglu_limit", 10.0}},
       {1, 3},
       0,
       "swiglu_limit"},
      {"inkling_text", moe, {{"mlp_layer_types", listed}}, {1, 3}, 0, "mlp_layer_types"},
      {"jamba",
       plain,
       {{"expert_layer_period", 2}, {"expert_layer_offset", 1}},
       {1, 3, 5},
       0,
       "expert_layer_offset"},
      {"laguna",
       moe,
       {{"mlp_layer_types", listed}, {"shared_expert_intermediate_size", 80}},
       {1, 3},
       80,
       moe},
      {"lfm2_moe",
       moe,
       {{"num_dense_layers", 2}, {"hidden_act", nullptr}},
       {2, 3, 4, 5},
       0,
       "num_dense_layers"},
      {"longcat_flash", "expert_ffn_hidden_size", {{"num_layers", 3}}, {0, 1, 2}, 0, "num_layers"},
      {"mellum", moe, json::object(), all, 0, moe},
      {"mimo_v2_flash",
       moe,
       {{"moe_layer_freq", {0, 1, 1, 0, 0, 1}}},
       {1, 2, 5},
       0,
       "moe_layer_freq"},
      {"minimax", plain, json::object(), all, 0, plain},
      {"mistral4",
       moe,
       {{"first_k_dense_replace", 0}, {"n_shared_experts", 1}},
       all,
       32,
       "n_shared_experts"},
      {"olmoe", plain, json::object(), all, 0, plain},
      {"openai_privacy_filter", plain, json::object(), all, 0, plain},
      {"phimoe", plain, json::object(), all, 0, plain},
      {"qwen4_exp_text",
       moe,
       {{"shared_expert_intermediate_size", 80}},
       all,
       80,
       "shared_expert_intermediate_size"},
      {"solar_open", moe, {{"n_shared_experts", 1}}, all, 32, "n_shared_experts"},
      {"step3p5", moe, {{"moe_layers_enum", "3,4,5"}}, {3, 4, 5}, 0, "moe_layers_enum"},
      {"step3p5", moe, {{"moe_layers_enum", {3, 5}}}, {3, 5}, 0, "moe_layers_enum"},
      {"zaya", moe, {{"num_experts_per_tok", 1}}, all, 0, "num_experts_per_tok"},
  };
  return table;
}

TEST(Families, WhatTheirConfigsSay) {
  for (const Type& type : types()) {
    SCOPED_TRACE(type.name);
    auto model = must(parse(config_of(type.name, type.size, type.more)));
    EXPECT_EQ(model->model_type, type.name);
    EXPECT_EQ(model->layers, type.layers);
    EXPECT_EQ(model->options.num_experts, kExperts);
    EXPECT_EQ(model->options.intermediate_size, kIntermediate);
    EXPECT_EQ(model->options.shared_intermediate_size, type.shared_size);
    EXPECT_EQ(model->options.top_k, type.name == std::string("zaya") ? 1 : 2);
  }
}

TEST(Families, AFieldThatIsMissingIsNamed) {
  for (const Type& type : types()) {
    SCOPED_TRACE(type.name);
    json config = config_of(type.name, type.size, type.more);
    config.erase(type.needs);
    if (config.contains("moe_topk")) config.erase("num_experts_per_tok");
    EXPECT_THAT(parse(config), Refused(Code::kBadInput, "missing, and"));
  }
}

TEST(Families, OneNumberForAllLayersMayBeAList) {
  json config = config_of("hunyuan_v1_moe", "intermediate_size", json::object());
  config["num_experts"] = {4, 4, 4, 4, 4, 4};
  ASSERT_OK(parse(config));
  config["num_experts"] = {4, 4, 8, 4, 4, 4};
  EXPECT_THAT(parse(config),
              Refused(Code::kUnsupported, "num_experts: expected one number for all layers"));
}

ATTACK_TEST(kHostileFiles, Families, HostileListsOfLayersAndLimits) {
  const json step = config_of("step3p5", "moe_intermediate_size", {{"moe_layers_enum", "3"}});
  for (const json& bad :
       {json("3,,4"), json("3;4"), json("a"), json("-1"), json("99999999"), json("]"),
        json("3],[4"), json(3), json(true), json::object(), json({"3", 4}), json({2.5, 3})}) {
    json config = step;
    config["moe_layers_enum"] = bad;
    EXPECT_EQ(parse(config).status().code(), Code::kBadInput) << bad;
    EXPECT_THAT(parse(config).status().message(), HasSubstr("moe_layers_enum")) << bad;
    attacked();
  }
  const json limits = {nullptr, 0, 0.0, 7, 16.5, 0};
  for (const json& bad :
       {json(7.0), json({7.0, 7.0}), json::array(), json({0, 0, 0, -1, 0, 0}),
        json({0, 0, 0, "7", 0, 0}), json({0, 0, 0, 1e300, 0, 0}), json({0, 0, 0, {7}, 0, 0})}) {
    json config = step;
    config["swiglu_limits"] = bad;
    EXPECT_EQ(parse(config).status().code(), Code::kBadInput) << bad;
    EXPECT_THAT(parse(config).status().message(), HasSubstr("swiglu_limits")) << bad;
    attacked();
  }
  json config = step;
  config["swiglu_limits"] = limits;
  const std::map<int64_t, float> expected = {{3, 7.0f}, {4, 16.5f}};
  EXPECT_EQ(parse(config)->swiglu_limits, expected);
  config = config_of("jamba", "intermediate_size",
                     {{"expert_layer_period", 2}, {"expert_layer_offset", 2}});
  EXPECT_THAT(parse(config).status().message(),
              HasSubstr("expert_layer_offset: expected an integer in [0, 1], got 2"));
}

TEST(Families, ADeclinedTypeSaysWhy) {
  const std::pair<const char*, const char*> declined[] = {
      {"dbrx", "rows of one matrix"},
      {"doge", "rows of an embedding"},
      {"gemma4", "GELU"},
      {"ernie4_5_vl_moe", "two sets"},
      {"jetmoe", "adds a bias"},
      {"nllb-moe", "relu and no gate"},
      {"switch_transformers", "no gate"},
      {"diffusion_gemma", "GELU"},
  };
  for (const auto& [type, words] : declined) {
    const Status status = parse(config_of(type, "intermediate_size", json::object())).status();
    EXPECT_THAT(status, Refused(Code::kUnsupported, words));
  }
  json laguna =
      config_of("laguna", "moe_intermediate_size",
                {{"mlp_layer_types", {"sparse", "dense", "dense", "dense", "dense", "dense"}},
                 {"shared_expert_intermediate_size", 0},
                 {"moe_apply_router_weight_on_input", false}});
  EXPECT_OK(parse(laguna));
  laguna["moe_apply_router_weight_on_input"] = true;
  EXPECT_THAT(parse(laguna).status().message(), HasSubstr("moe_apply_router_weight_on_input"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::families_test
