// config.json and hf_quant_config.json: fields that are read, missing, or refused, and why.
#include <nlohmann/json.hpp>

#include "checkpoint/model_config.h"
#include "checkpoint/quant_config.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using nlohmann::json;

json config_of(const char* type, SourceFormat format = SourceFormat::kModelOpt) {
  return CheckpointBuilder({.model_type = type, .format = format, .layers = 1, .num_experts = 4})
      .config();
}
Result<ModelInfo> parse(const json& config, const json& hf_quant = nullptr) {
  return parse_model_config(config.dump(), hf_quant.is_null() ? "" : hf_quant.dump());
}

// DeepSeek-V4-Flash's published numbers.
TEST(Config, DeepSeekV4) {
  const json config = {{"architectures", {"DeepseekV4ForCausalLM"}},
                       {"model_type", "deepseek_v4"},
                       {"hidden_size", 4096},
                       {"moe_intermediate_size", 2048},
                       {"n_routed_experts", 256},
                       {"n_shared_experts", 1},
                       {"num_experts_per_tok", 6},
                       {"num_hidden_layers", 43},
                       {"num_nextn_predict_layers", 1},
                       {"routed_scaling_factor", 1.5},
                       {"swiglu_limit", 10.0},
                       {"quantization_config",
                        {{"quant_method", "fp8"},
                         {"weight_block_size", {128, 128}},
                         {"moe_quant_algo", "NVFP4"},
                         {"quant_algo", "MIXED_PRECISION"},
                         {"ignore", {"*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"}}}}};
  auto model = must(parse(config));
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

  json native = config;  // the original checkpoint: FP8 attention, MXFP4 experts
  native["quantization_config"] = {{"quant_method", "fp8"}, {"scale_fmt", "ue8m0"}};
  EXPECT_EQ(parse(native)->format, SourceFormat::kMxfp4);
}

TEST(Config, EveryFamilyIsAValidLayer) {
  const std::pair<const char*, Activation> types[] = {
      {"deepseek_v3", Activation::kSwiglu}, {"deepseek_v4", Activation::kSwigluClamped},
      {"kimi_k2", Activation::kSwiglu},     {"kimi_k25", Activation::kSwiglu},
      {"qwen2_moe", Activation::kSwiglu},   {"qwen3_moe", Activation::kSwiglu},
      {"qwen3_next", Activation::kSwiglu},  {"qwen3_5_moe", Activation::kSwiglu},
      {"glm4_moe", Activation::kSwiglu},    {"glm5_next", Activation::kSwigluClamped},
      {"minimax_m2", Activation::kSwiglu},  {"minimax_m3", Activation::kSwigluOai},
      {"mixtral", Activation::kSwiglu},     {"llama4", Activation::kSwiglu},
      {"motif", Activation::kSwiglu}};
  for (const auto& [type, activation] : types) {
    SCOPED_TRACE(type);
    auto model = must(parse(config_of(type)));
    EXPECT_EQ(model->options.activation, activation);
    EXPECT_EQ(model->options.router_weight,
              std::string(type) == "deepseek_v4" ? RouterWeight::kBeforeDown
              : std::string(type) == "llama4"    ? RouterWeight::kOnInput
                                                 : RouterWeight::kAfterDown);
    EXPECT_OK(MoeConfig::make(model->options));
  }
  json text = config_of("llama4")["text_config"];  // only the language model
  EXPECT_EQ(parse(text)->model_type, "llama4_text");
  EXPECT_EQ(parse(text)->options.router_weight, RouterWeight::kOnInput);
  EXPECT_TRUE(parse(config_of("llama4"))->findings.empty());
}

TEST(Config, EachFieldThatIsNeededIsNamedWhenMissing) {
  for (const char* field :
       {"hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
        "num_hidden_layers", "first_k_dense_replace", "n_shared_experts", "hidden_act"}) {
    json config = config_of("deepseek_v3");
    ASSERT_EQ(config.erase(field), 1u);
    const Status status = parse(config).status();
    EXPECT_THAT(status, Refused(Code::kBadInput, std::string(field) + ": missing"));
  }
  for (const char* field : {"swiglu_limit", "routed_scaling_factor"}) {
    json config = config_of("deepseek_v4");
    ASSERT_EQ(config.erase(field), 1u);
    EXPECT_THAT(parse(config).status().message(), HasSubstr(std::string(field) + ": missing"))
        << field;
  }
  for (const char* field : {"swiglu_limit", "swiglu_alpha"}) {
    json config = config_of("minimax_m3");
    ASSERT_EQ(config["text_config"].erase(field), 1u);
    EXPECT_THAT(parse(config).status().message(), HasSubstr(std::string(field) + ": missing"))
        << field;
  }
  json config = config_of("qwen2_moe");
  config.erase("shared_expert_intermediate_size");
  EXPECT_THAT(parse(config).status().message(),
              HasSubstr("shared_expert_intermediate_size: missing"));
  config = config_of("qwen3_moe");
  config.erase("model_type");
  EXPECT_EQ(parse(config).status().message(), "config.json model_type: missing");
}

TEST(Config, NumbersOfTheWrongKindAreRefused) {
  for (const json& bad : {json(-1), json(0), json(2.5), json("64"), json(int64_t{1} << 40),
                          json::array(), json(true)}) {
    json config = config_of("qwen3_moe");
    config["hidden_size"] = bad;
    EXPECT_THAT(parse(config),
                Refused(Code::kBadInput, "hidden_size: expected an integer in [1, 1048576], got"));
  }
  for (const json& bad : {json(-1.0), json("10"), json(1e300)}) {
    json config = config_of("deepseek_v4");
    config["swiglu_limit"] = bad;
    EXPECT_THAT(parse(config).status().message(),
                HasSubstr("swiglu_limit: expected a positive number"))
        << bad;
  }
  json config = config_of("qwen3_moe");
  config["num_local_experts"] = 8;
  EXPECT_THAT(parse(config).status().message(),
              HasSubstr("num_local_experts: expected 4 as in num_experts, got 8"));
  config = config_of("qwen3_moe");
  config["num_experts_per_tok"] = 5;
  EXPECT_THAT(parse(config).status().message(), HasSubstr("at most the 4 experts"));
}

TEST(Config, WhichLayersAreMoe) {
  const auto layers = [](json config, const json& changes) {
    config["num_hidden_layers"] = 6;
    config.update(changes);
    Result<ModelInfo> model = parse(config);
    EXPECT_OK(model);
    return model.ok() ? model->layers : std::vector<int64_t>{};
  };
  using Layers = std::vector<int64_t>;
  const json deepseek = config_of("deepseek_v3");
  EXPECT_EQ(layers(deepseek, {{"first_k_dense_replace", 3}}), (Layers{3, 4, 5}));
  EXPECT_EQ(layers(deepseek, {{"first_k_dense_replace", 1}, {"moe_layer_freq", 2}}),
            (Layers{2, 4}));
  EXPECT_EQ(layers(deepseek, {{"moe_layer_freq", {0, 1, 0, 0, 1, 1}}}), (Layers{1, 4, 5}));
  EXPECT_EQ(layers(deepseek,
                   {{"mlp_layer_types", {"dense", "sparse", "dense", "moe", "hash_moe", "dense"}}}),
            (Layers{1, 3, 4}));
  const json qwen = config_of("qwen3_moe");
  EXPECT_EQ(layers(qwen, {{"decoder_sparse_step", 2}, {"mlp_only_layers", {3}}}), (Layers{1, 5}));
  json llama = config_of("llama4");
  llama["text_config"]["num_hidden_layers"] = 6;
  llama["text_config"]["interleave_moe_layer_step"] = 2;
  EXPECT_EQ(parse(llama)->layers, (Layers{1, 3, 5}));
  llama["text_config"]["moe_layers"] = {0, 4};
  EXPECT_EQ(parse(llama)->layers, (Layers{0, 4}));
  json bad = deepseek;
  bad["num_hidden_layers"] = 6;
  bad["mlp_layer_types"] = {"dense"};
  EXPECT_THAT(parse(bad).status().message(), HasSubstr("mlp_layer_types: expected a list of 6"));
}

// DeepSeek's own code clamps only if the limit is above 0; the others' code would clamp everything
// to 0.
TEST(Config, ASwigluLimitOfZeroIsNoClampInDeepseekV4) {
  json config = config_of("deepseek_v4");
  for (const json& zero : {json(0), json(0.0)}) {
    config["swiglu_limit"] = zero;
    const auto model = must(parse(config));
    EXPECT_EQ(model->options.activation, Activation::kSwiglu);
    EXPECT_FALSE(model->options.swiglu_limit.has_value());
  }
  json glm = config_of("glm5_next");
  (glm.contains("text_config") ? glm["text_config"] : glm)["swiglu_limit"] = 0;
  EXPECT_THAT(parse(glm).status().message(),
              HasSubstr("swiglu_limit: expected a positive number, got 0"));
}

// Python's json writes such numbers: Nemotron-3's published time_step_limit is [0.0, Infinity].
TEST(Config, NonFiniteNumbersAreReadAndRefusedWhereTheyAreUsed) {
  json config = config_of("deepseek_v4");
  config["time_step_limit"] = "@";
  config["router_jitter"] = "#";
  std::string text = config.dump();
  text.replace(text.find("\"@\""), 3, "[0.0, Infinity]");
  text.replace(text.find("\"#\""), 3, "NaN");
  ASSERT_OK(parse_model_config(text, ""));
  for (const char* key :
       {"swiglu_limit", "hidden_size", "n_routed_experts", "routed_scaling_factor"}) {
    for (const char* word : {"Infinity", "-Infinity", "NaN"}) {
      json bad = config;
      bad[key] = "@@";
      std::string bad_text = bad.dump();
      bad_text.replace(bad_text.find("\"@@\""), 4, word);
      const Status refused = parse_model_config(bad_text, "").status();
      EXPECT_THAT(refused, Refused(Code::kBadInput, std::string(key) + ": expected "));
      EXPECT_THAT(refused.message(), HasSubstr(std::string("got ") + word));
    }
  }
}

TEST(Config, ModelsThatWouldBeComputedWronglyAreDeclinedByName) {
  const auto declined = [](json config, const char* words) {
    const Status status = parse(config).status();
    EXPECT_THAT(status, Refused(Code::kUnsupported, words));
  };
  json config = config_of("qwen3_moe");
  config["model_type"] = "kimi_k3";
  declined(config, "SiTU");
  config["model_type"] = "some_new_moe";
  declined(config,
           "'some_new_moe' is not known; docs/reference/checkpoints.md lists those that are");
  EXPECT_LT(parse(config).status().message().size(), 120u);  // and no list of all that are
  config = config_of("qwen3_moe");
  config["hidden_act"] = "situ";
  declined(config, "SiTU");
  config["hidden_act"] = "gelu";
  declined(config, "expected silu for qwen3_moe, got 'gelu'");
  config = config_of("qwen3_moe");
  // a clamp that this family is not known to have must not be dropped
  config["swiglu_limit"] = 7.0;
  declined(config, "swiglu_limit");
  config = config_of("llama4");
  config["text_config"]["num_experts_per_tok"] = 2;
  declined(config, "before gemm1");
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
  for (const char* text :
       {"{\"quantization\": 3}", "{\"quantization\": {}}"}) {  // experts in floats need none
    attacked();
    EXPECT_EQ(parse_model_config(good, text)->quantization->refusal.code(), Code::kBadInput)
        << text;
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
