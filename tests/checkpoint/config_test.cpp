// config.json and hf_quant_config.json: fields that are read, missing, or refused, and why.
#include "checkpoint/configs.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test {
namespace {

using Layers = std::vector<int64_t>;

// DeepSeek-V4-Flash's published numbers.
TEST(Config, DeepSeekV4) {
  json config = json::parse(R"({
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "num_hidden_layers": 43, "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128],
      "moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION",
      "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]}})");
  const auto model = must(parsed(config));
  EXPECT_EQ(model->family, "deepseek_v4");
  EXPECT_EQ(model->architecture, "DeepseekV4ForCausalLM");
  EXPECT_EQ(model->format, SourceFormat::kModelOpt);
  EXPECT_EQ(model->quant_algo, "NVFP4");
  EXPECT_EQ(model->layers.size(), 43u);
  EXPECT_EQ(model->shared_experts, 1);
  const MoeOptions& options = model->options;
  EXPECT_EQ(options.num_experts, 256);
  EXPECT_EQ(options.top_k, 6);
  EXPECT_EQ(options.hidden_size, 4096);
  EXPECT_EQ(options.intermediate_size, 2048);
  EXPECT_EQ(options.shared_intermediate_size, 2048);
  EXPECT_EQ(options.activation, Activation::kSwigluClamped);
  EXPECT_EQ(options.swiglu_limit, 10.0f);
  EXPECT_EQ(options.router_weight, RouterWeight::kBeforeDown);
  EXPECT_EQ(options.max_router_weight, 1.5f);
  EXPECT_OK(MoeConfig::make(options));
  // The original checkpoint: FP8 attention, MXFP4 experts.
  config["quantization_config"] = {{"quant_method", "fp8"}, {"scale_fmt", "ue8m0"}};
  EXPECT_EQ(parsed(config)->format, SourceFormat::kMxfp4);
  // DeepSeek's own code clamps only if the limit is above 0.
  config["swiglu_limit"] = 0.0;
  EXPECT_EQ(parsed(config)->options.activation, Activation::kSwiglu);
  EXPECT_EQ(parsed(config)->options.swiglu_limit, std::nullopt);
}

TEST(Config, EveryFamilyIsAValidLayer) {
  using A = Activation;
  using W = RouterWeight;
  const struct {
    const char* type;
    Activation activation = A::kSwiglu;
    RouterWeight router_weight = W::kAfterDown;
  } types[] = {{"deepseek_v3"}, {"deepseek_v4", A::kSwigluClamped, W::kBeforeDown},
               {"kimi_k2"},     {"kimi_k25"},
               {"qwen2_moe"},   {"qwen3_moe"},
               {"qwen3_next"},  {"qwen3_5_moe"},
               {"glm4_moe"},    {"glm5_next", A::kSwigluClamped},
               {"minimax_m2"},  {"minimax_m3", A::kSwigluOai},
               {"mixtral"},     {"llama4", A::kSwiglu, W::kOnInput},
               {"motif"}};
  for (const auto& [type, activation, router_weight] : types) {
    SCOPED_TRACE(type);
    const auto model = must(parsed(config_of(type)));
    EXPECT_EQ(model->options.activation, activation);
    EXPECT_EQ(model->options.router_weight, router_weight);
    EXPECT_TRUE(model->findings.empty());
    EXPECT_OK(MoeConfig::make(model->options));
  }
  const auto text = must(parsed(config_of("llama4")["text_config"]));  // only the language model
  EXPECT_EQ(text->model_type, "llama4_text");
  EXPECT_EQ(text->options.router_weight, W::kOnInput);
}

TEST(Config, WhatIsMissingOrWrongIsNamed) {
  const struct {
    const char *type, *patch, *words;
    Code code = Code::kBadInput;
  } cases[] = {
      {"deepseek_v3", R"({"hidden_size": null})", "hidden_size: missing"},
      {"deepseek_v3", R"({"num_hidden_layers": null})", "num_hidden_layers: missing"},
      {"deepseek_v3", R"({"first_k_dense_replace": null})", "first_k_dense_replace: missing"},
      {"deepseek_v3", R"({"n_shared_experts": null})", "n_shared_experts: missing"},
      {"deepseek_v3", R"({"hidden_act": null})", "hidden_act: missing"},
      {"deepseek_v4", R"({"swiglu_limit": null})", "swiglu_limit: missing"},
      {"deepseek_v4", R"({"routed_scaling_factor": null})", "routed_scaling_factor: missing"},
      {"minimax_m3", R"({"text_config": {"swiglu_alpha": null}})", "swiglu_alpha: missing"},
      {"qwen2_moe", R"({"shared_expert_intermediate_size": null})",
       "shared_expert_intermediate_size: missing"},
      {"qwen3_moe", R"({"model_type": null})", "config.json model_type: missing"},
      {"qwen3_moe", R"({"hidden_size": -1})", "hidden_size: expected an integer in [1, 1048576]"},
      {"qwen3_moe", R"({"hidden_size": 2.5})", "hidden_size: expected an integer"},
      {"qwen3_moe", R"({"hidden_size": 1048577})", "hidden_size: expected an integer"},
      {"qwen3_moe", R"({"num_local_experts": 8})", "expected 4 as in num_experts, got 8"},
      {"qwen3_moe", R"({"num_experts_per_tok": 5})", "at most the 4 experts"},
      {"deepseek_v4", R"({"swiglu_limit": -1})", "swiglu_limit: expected a positive number"},
      {"deepseek_v4", R"({"swiglu_limit": 1e300})", "swiglu_limit: expected a positive number"},
      // Other families' code would clamp everything to 0.
      {"glm5_next", R"({"text_config": {"swiglu_limit": 0}})",
       "swiglu_limit: expected a positive number, got 0"},
      {"deepseek_v3", R"({"num_hidden_layers": 6, "mlp_layer_types": ["dense"]})",
       "mlp_layer_types: expected a list of 6"},
      // Models that would be computed wrongly.
      {"qwen3_moe", R"({"hidden_act": "situ"})", "expected silu for qwen3_moe, got 'situ'",
       Code::kUnsupported},
      {"qwen3_moe", R"({"model_type": "some_new_moe"})", "'some_new_moe' is not known",
       Code::kUnsupported},
      {"qwen3_moe", R"({"hidden_act": "gelu"})", "expected silu for qwen3_moe, got 'gelu'",
       Code::kUnsupported},
      // A clamp that this family is not known to have must not be dropped.
      {"qwen3_moe", R"({"swiglu_limit": 7.0})", "swiglu_limit", Code::kUnsupported},
      {"llama4", R"({"text_config": {"num_experts_per_tok": 2}})", "before gemm1",
       Code::kUnsupported},
  };
  for (const auto& one : cases) {
    const json config = config_of(one.type, one.patch);
    EXPECT_THAT(parsed(config), Refused(one.code, one.words)) << one.type << " " << one.patch;
  }
}

TEST(Config, WhichLayersAreMoe) {
  const struct {
    const char *type, *patch;
    Layers layers;
  } cases[] = {
      {"deepseek_v3", R"({"first_k_dense_replace": 3})", {3, 4, 5}},
      {"deepseek_v3", R"({"first_k_dense_replace": 1, "moe_layer_freq": 2})", {2, 4}},
      {"deepseek_v3", R"({"moe_layer_freq": [0, 1, 0, 0, 1, 1]})", {1, 4, 5}},
      {"deepseek_v3",
       R"({"mlp_layer_types": ["dense", "sparse", "dense", "moe", "hash_moe", "dense"]})",
       {1, 3, 4}},
      {"qwen3_moe", R"({"decoder_sparse_step": 2, "mlp_only_layers": [3]})", {1, 5}},
      {"llama4", R"({"text_config": {"interleave_moe_layer_step": 2}})", {1, 3, 5}},
      {"llama4", R"({"text_config": {"moe_layers": [0, 4]}})", {0, 4}},
  };
  for (const auto& [type, patch, layers] : cases) {
    json config = config_of(type, patch);
    (config.contains("text_config") ? config["text_config"] : config)["num_hidden_layers"] = 6;
    EXPECT_EQ(must(parsed(config))->layers, layers) << type << " " << patch;
  }
}

// Python's json writes such numbers: Nemotron-3's published time_step_limit is [0.0, Infinity].
TEST(Config, NonFiniteNumbersAreRefusedOnlyIfTheyAreUsed) {
  const auto with = [](const std::string& key, const std::string& value) {
    std::string text = config_of("deepseek_v4").dump();
    const size_t at = text.find("\"" + key + "\":");
    if (at != text.npos) text.replace(at, text.find_first_of(",}", at) - at + 1, "");
    return parse_model_config(text.insert(1, "\"" + key + "\":" + value + ","), "").status();
  };
  EXPECT_OK(with("time_step_limit", "[0.0, Infinity]"));
  EXPECT_OK(with("router_jitter", "NaN"));
  for (const char* key : {"swiglu_limit", "hidden_size", "routed_scaling_factor"}) {
    for (const char* word : {"Infinity", "-Infinity", "NaN"}) {
      const Status refused = with(key, word);
      EXPECT_THAT(refused, Refused(Code::kBadInput, std::string(key) + ": expected "));
      EXPECT_THAT(refused.message(), HasSubstr(std::string("got ") + word));
    }
  }
}

ATTACK_TEST(kHostileFiles, Config, HostileTextIsAnError) {
  for (const char* text :
       {"", "{", "[]", "null", "3", "{\"model_type\": 3}", "{\"model_type\": \"qwen3_moe\"",
        "{\"model_type\": \"qwen3_moe\", \"model_type\": \"x\"}", "{\"text_config\": []}",
        "{\"model_type\": \"\\ud800\"}"}) {
    attacked();
    EXPECT_EQ(parse_model_config(text, "").status().code(), Code::kBadInput) << text;
  }
  const std::string good = config_of("qwen3_moe").dump();
  for (const char* text : {"{", "[]", "{}"}) {
    attacked();
    EXPECT_EQ(parse_model_config(good, text).status().code(), Code::kBadInput) << text;
  }
  // Experts in floats need no quantization.
  for (const char* text : {"{\"quantization\": 3}", "{\"quantization\": {}}"}) {
    attacked();
    EXPECT_EQ(parse_model_config(good, text)->quantization->refusal.code(), Code::kBadInput)
        << text;
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
