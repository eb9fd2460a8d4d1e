// Nemotron-H's config. Whole checkpoints: tests/quantize/synthesize_test.cpp,
// tests/python/test_nemotron.py.

#include <nlohmann/json.hpp>

#include "checkpoint/model_config.h"
#include "checkpoint/names.h"
#include "checkpoint/quant_config.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using nlohmann::json;

// The shape of Nemotron-3 Nano, with four layers.
json config() {
  return {{"model_type", "nemotron_h"},
          {"architectures", {"NemotronHForCausalLM"}},
          {"hybrid_override_pattern", "ME*E"},
          {"num_hidden_layers", 4},
          {"hidden_size", 2688},
          {"mlp_hidden_act", "relu2"},
          {"mamba_hidden_act", "silu"},
          {"n_routed_experts", 128},
          {"n_shared_experts", 1},
          {"num_experts_per_tok", 6},
          {"moe_intermediate_size", 1856},
          {"moe_shared_expert_intermediate_size", 3712},
          {"moe_latent_size", nullptr},
          {"routed_scaling_factor", 2.5}};
}

Result<ModelInfo> parse(const json& text) { return parse_model_config(text.dump(), ""); }

TEST(Nemotron, NanoHasExpertsOfTheModelsWidth) {
  const auto model = must(parse(config()));
  EXPECT_EQ(model->family, "nemotron_h");
  EXPECT_EQ(model->layers, (std::vector<int64_t>{1, 3}));
  const MoeOptions& options = model->options;
  EXPECT_EQ(options.activation, Activation::kRelu2);
  EXPECT_EQ(options.swiglu_limit, std::nullopt);
  EXPECT_EQ(options.hidden_size, 2688);
  EXPECT_EQ(model->model_hidden_size, 2688);
  EXPECT_EQ(options.intermediate_size, 1856);
  EXPECT_EQ(options.shared_intermediate_size, 3712);
  EXPECT_EQ(options.router_weight, RouterWeight::kAfterDown);
  EXPECT_EQ(options.num_experts, 128);
  EXPECT_EQ(options.top_k, 6);
}

TEST(Nemotron, UltraHasALatentWidthAndAListOfLayersAlone) {
  json ultra = config();
  ultra.erase("hybrid_override_pattern");
  ultra["num_hidden_layers"] = nullptr;
  ultra["hidden_size"] = 8192;
  ultra["moe_latent_size"] = 2048;
  for (const json& list : {json({"mamba", "moe", "attention", "moe", "mlp"}),
                           json({"linear_attention", "moe", "full_attention", "moe", "mlp"})}) {
    for (const char* key : {"layers_block_type", "layer_types"}) {
      json one = ultra;
      one[key] = list;
      const auto model = must(parse(one));
      EXPECT_EQ(model->num_hidden_layers, 5);
      EXPECT_EQ(model->layers, (std::vector<int64_t>{1, 3}));
      EXPECT_EQ(model->options.hidden_size, 2048);
      EXPECT_EQ(model->model_hidden_size, 8192);
    }
  }
}

TEST(Nemotron, WhatDisagreesOrIsUnknownIsTold) {
  const auto said = [](const char* key, const json& value) {
    json one = config();
    one[key] = value;
    return parse(one).status().message();
  };
  EXPECT_THAT(said("layers_block_type", {"moe", "moe", "attention", "moe"}),
              HasSubstr("hybrid_override_pattern: expected the layers of layers_block_type"));
  EXPECT_THAT(said("layers_block_type", {"mamba", "moe", "sliding", "moe"}),
              HasSubstr("layers_block_type entry 2: got \"sliding\""));
  EXPECT_THAT(said("layers_block_type", "ME*E"), HasSubstr("layers_block_type: expected a list"));
  EXPECT_THAT(said("hybrid_override_pattern", "MEOE"),
              HasSubstr("expected M, *, - and E, got 'O'"));
  EXPECT_THAT(said("hybrid_override_pattern", 4),
              HasSubstr("hybrid_override_pattern: expected a string"));
  EXPECT_THAT(said("hybrid_override_pattern", "MM*-"),
              HasSubstr("no layer of the model is an MoE layer"));
  EXPECT_THAT(said("num_hidden_layers", 5),
              HasSubstr("num_hidden_layers: expected the 4 layers that the config lists"));
  EXPECT_THAT(said("hybrid_override_pattern", nullptr), HasSubstr("layers_block_type: missing"));
  EXPECT_THAT(said("mlp_hidden_act", "silu"),
              HasSubstr("mlp_hidden_act: expected relu2 for nemotron_h"));
  EXPECT_THAT(said("mlp_hidden_act", nullptr), HasSubstr("mlp_hidden_act: missing"));
  EXPECT_THAT(said("moe_latent_size", -1),
              HasSubstr("moe_latent_size: expected an integer in [1,"));
  EXPECT_THAT(said("moe_shared_expert_intermediate_size", nullptr),
              HasSubstr("moe_shared_expert_intermediate_size: missing"));
  json one = config();
  one.erase("n_shared_experts");
  EXPECT_THAT(parse(one).status().message(), HasSubstr("n_shared_experts: missing"));
  one["n_shared_experts"] = nullptr;
  const auto without = must(parse(one));
  EXPECT_EQ(without->options.shared_intermediate_size, 0);
  one = {{"model_type", "qwen3_moe"}, {"hidden_act", "silu"},        {"num_hidden_layers", 2},
         {"hidden_size", 64},         {"moe_intermediate_size", 32}, {"num_experts", 4},
         {"num_experts_per_tok", 2},  {"moe_latent_size", 32}};
  EXPECT_THAT(parse(one).status().message(),
              HasSubstr("moe_latent_size: experts behind a projection are known of"));
}

// ModelOpt's export of Nemotron-3.5: FP8 for Mamba's projections, which have the same word in their
// names as the experts.
TEST(Nemotron, MixedPrecisionSpeaksOfTheExpertsByTheirNames) {
  json mixed = config();
  json& layers = mixed["quantization_config"]["quantized_layers"];
  mixed["quantization_config"].update(
      {{"quant_method", "modelopt"}, {"quant_algo", "MIXED_PRECISION"}});
  for (const char* layer : {"1", "3"}) {
    const std::string mixer = std::string("backbone.layers.") + layer + ".mixer.";
    for (const char* projection : {"up_proj", "down_proj"}) {
      layers[mixer + "experts.0." + projection] = {{"quant_algo", "NVFP4"}, {"group_size", 16}};
      layers[mixer + "shared_experts." + projection] = {{"quant_algo", "FP8"}};
    }
  }
  for (const char* projection : {"in_proj", "out_proj"})
    layers[std::string("backbone.layers.0.mixer.") + projection] = {{"quant_algo", "FP8"}};
  auto model = must(parse(mixed));
  EXPECT_EQ(model->quant_algo, "NVFP4");
  const char* const up = "backbone.layers.3.mixer.experts.0.up_proj";
  EXPECT_EQ(model->quantization->of(up)->activation_format, ActivationFormat::kNvfp4);
  EXPECT_FALSE(
      model->quantization->of("backbone.layers.3.mixer.shared_experts.up_proj")->refusal.ok());
  for (auto& [name, entry] : layers.items())
    if (name.find(".experts.") != std::string::npos) entry["quant_algo"] = "W4A16_NVFP4";
  model = parse(mixed);
  ASSERT_OK(model);
  EXPECT_EQ(model->quantization->of(up)->activation_format, ActivationFormat::kBf16);
}

TEST(Nemotron, NamesComeApartAndTogether) {
  const FamilyNames& family = *family_names("nemotron_h");
  for (const char* prefix :
       {"backbone.", "model.", "language_model.backbone.", "language_model.model."}) {
    const std::string stem = std::string(prefix) + "layers.3.mixer.experts";
    std::string name = stem + ".17.up_proj.weight_scale_2";
    auto parsed = parse_moe_tensor_name(family, name);
    ASSERT_TRUE(parsed) << name;
    EXPECT_EQ(parsed->projection, Projection::kUp);
    EXPECT_EQ(parsed->expert, 17);
    EXPECT_EQ(expert_tensor_name(stem, 17, Projection::kUp, Words::kProj, false, "weight_scale_2"),
              name);
    name = stem + ".up_proj";
    parsed = parse_moe_tensor_name(family, name);
    ASSERT_TRUE(parsed) << name;
    EXPECT_EQ(parsed->role, TensorRole::kStacked);
    EXPECT_EQ(parsed->projection, Projection::kUp);
    EXPECT_EQ(stacked_tensor_name(stem, Projection::kUp, Words::kProj, false, "weight"), name);
    EXPECT_FALSE(parse_moe_tensor_name(family, stem + ".gate_up_proj"));
  }
  EXPECT_FALSE(parse_moe_tensor_name(family, "mtp.layers.0.mixer.experts.1.up_proj.weight"));
  EXPECT_FALSE(parse_moe_tensor_name(family, "backbone.layers.3.mixer.in_proj.weight"));
  EXPECT_THAT(std::string(ignored_reason("backbone.layers.3.mixer.fc1_latent_proj.weight")),
              HasSubstr("projection between the model's width and the experts'"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
