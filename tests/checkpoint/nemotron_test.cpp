// Nemotron-H's config and names. Whole checkpoints: tests/quantize/synthesize_test.cpp,
// tests/python/test_nemotron.py.
#include "checkpoint/configs.h"
#include "checkpoint/names.h"

namespace nvfp4_moe::internal::test {
namespace {

// The shape of Nemotron-3 Nano, with four layers, after a merge patch.
json nano(const char* patch = "{}") {
  json config = json::parse(R"({
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "ME*E", "num_hidden_layers": 4, "hidden_size": 2688,
    "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5})");
  config["moe_latent_size"] = nullptr;
  config.merge_patch(json::parse(patch));
  return config;
}

TEST(Nemotron, NanoHasExpertsOfTheModelsWidth) {
  const auto model = must(parsed(nano()));
  EXPECT_EQ(model->family, "nemotron_h");
  EXPECT_EQ(model->layers, (std::vector<int64_t>{1, 3}));
  const MoeOptions& options = model->options;
  EXPECT_EQ(options.activation, Activation::kRelu2);
  EXPECT_EQ(options.swiglu_limit, std::nullopt);
  EXPECT_EQ(options.hidden_size, 2688);
  EXPECT_EQ(options.intermediate_size, 1856);
  EXPECT_EQ(options.shared_intermediate_size, 3712);
  EXPECT_EQ(options.router_weight, RouterWeight::kAfterDown);
  EXPECT_EQ(options.num_experts, 128);
  EXPECT_EQ(options.top_k, 6);
}

TEST(Nemotron, UltraHasALatentWidthAndOnlyAListOfLayers) {
  for (const char* layers :
       {R"({"layers_block_type": ["mamba", "moe", "attention", "moe", "mlp"]})",
        R"({"layer_types": ["linear_attention", "moe", "full_attention", "moe", "mlp"]})"}) {
    json ultra = nano(R"({"hybrid_override_pattern": null, "num_hidden_layers": null,
                          "hidden_size": 8192, "moe_latent_size": 2048})");
    ultra.merge_patch(json::parse(layers));
    const auto model = must(parsed(ultra));
    EXPECT_EQ(model->num_hidden_layers, 5);
    EXPECT_EQ(model->layers, (std::vector<int64_t>{1, 3}));
    EXPECT_EQ(model->options.hidden_size, 2048);
    EXPECT_EQ(model->model_hidden_size, 8192);
  }
}

TEST(Nemotron, WhatDisagreesOrIsUnknownIsNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"layers_block_type": ["moe", "moe", "attention", "moe"]})",
       "hybrid_override_pattern: expected the layers of layers_block_type"},
      {R"({"layers_block_type": ["mamba", "moe", "sliding", "moe"]})",
       "layers_block_type entry 2: got \"sliding\""},
      {R"({"layers_block_type": "ME*E"})", "layers_block_type: expected a list"},
      {R"({"hybrid_override_pattern": "MEOE"})", "expected M, *, - and E, got 'O'"},
      {R"({"hybrid_override_pattern": 4})", "hybrid_override_pattern: expected a string"},
      {R"({"hybrid_override_pattern": "MM*-"})", "no layer of the model is an MoE layer"},
      {R"({"hybrid_override_pattern": null})", "layers_block_type: missing"},
      {R"({"num_hidden_layers": 5})",
       "num_hidden_layers: expected the 4 layers that the config lists"},
      {R"({"mlp_hidden_act": "silu"})", "mlp_hidden_act: expected relu2 for nemotron_h"},
      {R"({"mlp_hidden_act": null})", "mlp_hidden_act: missing"},
      {R"({"moe_latent_size": -1})", "moe_latent_size: expected an integer in [1,"},
      {R"({"moe_shared_expert_intermediate_size": null})",
       "moe_shared_expert_intermediate_size: missing"},
      {R"({"n_shared_experts": null})", "n_shared_experts: missing"},
  };
  for (const auto& [patch, words] : cases)
    EXPECT_THAT(parsed(nano(patch)).status().message(), HasSubstr(words)) << patch;
  EXPECT_THAT(parsed(config_of("qwen3_moe", R"({"moe_latent_size": 32})")).status().message(),
              HasSubstr("moe_latent_size: experts after a projection are known of"));
}

// ModelOpt's export of Nemotron-3.5: FP8 for Mamba's projections, which have the same word in their
// names as the experts.
TEST(Nemotron, MixedPrecisionNamesTheExperts) {
  json mixed = nano(R"({"quantization_config": {"quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION", "quantized_layers": {
      "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
      "backbone.layers.3.mixer.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
      "backbone.layers.3.mixer.shared_experts.up_proj": {"quant_algo": "FP8"}}}})");
  const char* const up = "backbone.layers.3.mixer.experts.0.up_proj";
  const auto activations = [&] {
    return must(parsed(mixed))->quantization->of(up)->activation_format;
  };
  EXPECT_EQ(activations(), ActivationFormat::kNvfp4);
  EXPECT_FALSE(must(parsed(mixed))
                   ->quantization->of("backbone.layers.3.mixer.shared_experts.up_proj")
                   ->refusal.ok());
  mixed["quantization_config"]["quantized_layers"][up]["quant_algo"] = "W4A16_NVFP4";
  EXPECT_EQ(activations(), ActivationFormat::kBf16);
}

TEST(Nemotron, NamesAreParsedAndWritten) {
  const FamilyNames& family = *family_names("nemotron_h");
  for (const char* prefix :
       {"backbone.", "model.", "language_model.backbone.", "language_model.model."}) {
    const std::string stem = std::string(prefix) + "layers.3.mixer.experts";
    std::string name = stem + ".17.up_proj.weight_scale_2";
    auto found = parse_moe_tensor_name(family, name);
    ASSERT_TRUE(found) << name;
    EXPECT_EQ(found->projection, Projection::kUp);
    EXPECT_EQ(found->expert, 17);
    EXPECT_EQ(expert_tensor_name(stem, 17, Projection::kUp, Words::kProj, false, "weight_scale_2"),
              name);
    name = stem + ".up_proj";
    found = parse_moe_tensor_name(family, name);
    ASSERT_TRUE(found) << name;
    EXPECT_EQ(found->role, TensorRole::kStacked);
    EXPECT_EQ(found->projection, Projection::kUp);
    EXPECT_EQ(stacked_tensor_name(stem, Projection::kUp, Words::kProj, false, "weight"), name);
    EXPECT_FALSE(parse_moe_tensor_name(family, stem + ".gate_up_proj"));
    EXPECT_FALSE(parse_moe_tensor_name(family, stem + ".017.up_proj.weight"));
  }
  EXPECT_FALSE(parse_moe_tensor_name(family, "mtp.layers.0.mixer.experts.1.up_proj.weight"));
  EXPECT_FALSE(parse_moe_tensor_name(family, "backbone.layers.3.mixer.in_proj.weight"));
  EXPECT_THAT(std::string(ignored_reason("backbone.layers.3.mixer.fc1_latent_proj.weight")),
              HasSubstr("projection between the model's width and the experts'"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
