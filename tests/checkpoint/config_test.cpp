// config.json and hf_quant_config.json: what is read, what is missing, what is refused and why.
#include <nlohmann/json.hpp>

#include "checkpoint/model_config.h"
#include "checkpoint/quant_config.h"
#include "support/attack.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe {
namespace {

using nlohmann::json;
using test::attacked;
using test::CheckpointBuilder;
using testing::HasSubstr;

json config_of(const char* type, SourceFormat format = SourceFormat::kModelOpt) {
  return CheckpointBuilder({.model_type = type, .format = format, .layers = 1, .num_experts = 4}).config();
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
  Result<ModelInfo> model = parse(config);
  ASSERT_OK(model);
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
    Result<ModelInfo> model = parse(config_of(type));
    ASSERT_OK(model);
    EXPECT_EQ(model->options.activation, activation);
    EXPECT_EQ(model->options.router_weight, std::string(type) == "deepseek_v4" ? RouterWeight::kBeforeDown
                                            : std::string(type) == "llama4"    ? RouterWeight::kOnInput
                                                                               : RouterWeight::kAfterDown);
    EXPECT_OK(MoeConfig::make(model->options));
  }
  json text = config_of("llama4")["text_config"];  // the language model alone
  EXPECT_EQ(parse(text)->model_type, "llama4_text");
  EXPECT_EQ(parse(text)->options.router_weight, RouterWeight::kOnInput);
  EXPECT_TRUE(parse(config_of("llama4"))->findings.empty());
}

TEST(Config, EachFieldThatIsNeededIsNamedWhenMissing) {
  for (const char* field : {"hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
                            "num_hidden_layers", "first_k_dense_replace", "n_shared_experts", "hidden_act"}) {
    json config = config_of("deepseek_v3");
    ASSERT_EQ(config.erase(field), 1u);
    const Status status = parse(config).status();
    EXPECT_EQ(status.code(), Code::kBadInput) << field;
    EXPECT_THAT(status.message(), HasSubstr(std::string(field) + ": missing"));
  }
  for (const char* field : {"swiglu_limit", "routed_scaling_factor"}) {
    json config = config_of("deepseek_v4");
    ASSERT_EQ(config.erase(field), 1u);
    EXPECT_THAT(parse(config).status().message(), HasSubstr(std::string(field) + ": missing")) << field;
  }
  for (const char* field : {"swiglu_limit", "swiglu_alpha"}) {
    json config = config_of("minimax_m3");
    ASSERT_EQ(config["text_config"].erase(field), 1u);
    EXPECT_THAT(parse(config).status().message(), HasSubstr(std::string(field) + ": missing")) << field;
  }
  json config = config_of("qwen2_moe");
  config.erase("shared_expert_intermediate_size");
  EXPECT_THAT(parse(config).status().message(), HasSubstr("shared_expert_intermediate_size: missing"));
  config = config_of("qwen3_moe");
  config.erase("model_type");
  EXPECT_EQ(parse(config).status().message(), "config.json model_type: missing");
}

TEST(Config, NumbersOfTheWrongKindAreRefused) {
  for (const json& bad :
       {json(-1), json(0), json(2.5), json("64"), json(int64_t{1} << 40), json::array(), json(true)}) {
    json config = config_of("qwen3_moe");
    config["hidden_size"] = bad;
    EXPECT_EQ(parse(config).status().code(), Code::kBadInput) << bad;
    EXPECT_THAT(parse(config).status().message(), HasSubstr("hidden_size: expected an integer in [1, 1048576], got"));
  }
  for (const json& bad : {json(-1.0), json(0), json("10"), json(1e300)}) {
    json config = config_of("deepseek_v4");
    config["swiglu_limit"] = bad;
    EXPECT_THAT(parse(config).status().message(), HasSubstr("swiglu_limit: expected a positive number")) << bad;
  }
  json config = config_of("qwen3_moe");
  config["num_local_experts"] = 8;
  EXPECT_THAT(parse(config).status().message(), HasSubstr("num_local_experts: expected 4 as in num_experts, got 8"));
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
  EXPECT_EQ(layers(deepseek, {{"first_k_dense_replace", 1}, {"moe_layer_freq", 2}}), (Layers{2, 4}));
  EXPECT_EQ(layers(deepseek, {{"moe_layer_freq", {0, 1, 0, 0, 1, 1}}}), (Layers{1, 4, 5}));
  EXPECT_EQ(layers(deepseek, {{"mlp_layer_types", {"dense", "sparse", "dense", "moe", "hash_moe", "dense"}}}),
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

TEST(Config, ModelsThatWouldBeComputedWronglyAreDeclinedByName) {
  const auto declined = [](json config, const char* words) {
    const Status status = parse(config).status();
    EXPECT_EQ(status.code(), Code::kUnsupported) << status.message();
    EXPECT_THAT(status.message(), HasSubstr(words));
  };
  json config = config_of("qwen3_moe");
  config["model_type"] = "kimi_k3";
  declined(config, "SiTU");
  config["model_type"] = "some_new_moe";
  declined(config, "'some_new_moe' is not known; docs/checkpoints.md lists those that are");
  for (const char* type :
       {"deepseek_v2", "deepseek_v32", "deepseek_v4", "kimi_k25", "kimi_linear", "qwen2_moe", "qwen3_5_moe_text",
        "qwen3_6_moe", "qwen3_vl_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "glm5_next", "minimax_m2",
        "minimax_m3_vl", "mixtral", "llama4", "llama4_text", "motif"}) {
    declined(config, type);
  }
  config = config_of("qwen3_moe");
  config["hidden_act"] = "situ";
  declined(config, "SiTU");
  config["hidden_act"] = "gelu";
  declined(config, "expected silu for qwen3_moe, got 'gelu'");
  config = config_of("qwen3_moe");
  config["swiglu_limit"] = 7.0;  // a clamp that this family is not known to have must not be dropped
  declined(config, "swiglu_limit");
  config = config_of("llama4");
  config["text_config"]["num_experts_per_tok"] = 2;
  declined(config, "before gemm1");
}

// The refusal of experts that are not floats.
Status refusal(const Result<ModelInfo>& model, const char* module = "model.layers.0.mlp.experts.0.up_proj") {
  if (!model.ok()) return model.status();
  if (!model->quantization->refusal.ok()) return model->quantization->refusal;
  const Result<ModuleScheme> scheme = model->quantization->of(module);
  return scheme.ok() ? scheme->refusal : scheme.status();
}
ActivationFormat activations(const Result<ModelInfo>& model,
                             const char* module = "model.layers.0.mlp.experts.0.up_proj") {
  EXPECT_OK(refusal(model, module));
  return model->quantization->of(module)->activation_format;
}

TEST(Quantization, AlgorithmsThatDecodeOtherwiseAreRefusedByName) {
  for (const char* algo : {"NVFP4_AWQ", "NVFP4_SVD", "FP8", "INT4_AWQ", "SOMETHING"}) {
    json config = config_of("qwen3_moe");
    config["quantization_config"]["quant_algo"] = algo;
    const Status status = refusal(parse(config));
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_THAT(status.message(), HasSubstr(algo));
    EXPECT_THAT(status.message(), HasSubstr("config.json quantization_config: "));
  }
  for (const char* method : {"awq", "gptq", "bitsandbytes", "fp8"}) {
    json config = config_of("qwen3_moe");
    config["quantization_config"]["quant_method"] = method;
    EXPECT_EQ(refusal(parse(config)).code(), Code::kUnsupported);
    EXPECT_THAT(refusal(parse(config)).message(), HasSubstr(method));
  }
}

TEST(Quantization, Fp8ActivationsAreDeclaredAndNotRefused) {
  for (const char* algo : {"W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8"}) {
    json config = config_of("qwen3_moe");
    config["quantization_config"] = {{"quant_method", "modelopt"}, {"quant_algo", algo}};
    EXPECT_EQ(activations(parse(config)), ActivationFormat::kFp8) << algo;
  }
  json config = config_of("deepseek_v4", SourceFormat::kMxfp4);
  EXPECT_EQ(activations(parse(config), "layers.0.ffn.experts.0.w1"), ActivationFormat::kFp8);
}

TEST(Quantization, GroupSizesOtherThan16AreRefused) {
  json config = config_of("qwen3_moe");
  config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32;
  EXPECT_EQ(refusal(parse(config)).code(), Code::kUnsupported);
  EXPECT_THAT(refusal(parse(config)).message(), HasSubstr("group_size: expected 16 for NVFP4, got 32"));
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.hf_quant_config()["quantization"]["group_size"] = 128;
  EXPECT_THAT(refusal(parse(builder.config(), builder.hf_quant_config())).message(),
              HasSubstr("hf_quant_config.json: group_size: expected 16 for NVFP4, got 128"));
  config = config_of("qwen3_moe", SourceFormat::kCompressedTensors);
  config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32;
  EXPECT_THAT(refusal(parse(config)).message(), HasSubstr("group_size: expected 16 for NVFP4, got 32"));
}

TEST(Quantization, BothFilesMustAgree) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  EXPECT_OK(refusal(parse(builder.config(), builder.hf_quant_config())));
  EXPECT_EQ(parse(builder.config(), builder.hf_quant_config())->producer, "modelopt 0.47.0");
  json config = builder.config();
  config.erase("quantization_config");
  Result<ModelInfo> only_file = parse(config, builder.hf_quant_config());
  ASSERT_OK(only_file);
  EXPECT_EQ(only_file->format, SourceFormat::kModelOpt);
  EXPECT_EQ(only_file->producer, "modelopt 0.47.0");
  builder.hf_quant_config()["quantization"]["quant_algo"] = "W4A16_NVFP4";
  EXPECT_EQ(activations(parse(config, builder.hf_quant_config())), ActivationFormat::kBf16);
  const Status status = refusal(parse(builder.config(), builder.hf_quant_config()));
  EXPECT_EQ(status.code(), Code::kBadInput);
  EXPECT_THAT(status.message(), HasSubstr("expected 'NVFP4' as in config.json, got 'W4A16_NVFP4'"));
}

TEST(Quantization, MixedPrecisionIsReadForTheExpertsAlone) {
  json config = config_of("qwen3_moe");
  json& quantization = config["quantization_config"];
  quantization = {{"quant_method", "modelopt"}, {"quant_algo", "MIXED_PRECISION"}};
  EXPECT_THAT(refusal(parse(config)).message(), HasSubstr("quantized_layers: missing"));
  json& layers = quantization["quantized_layers"];
  layers["model.layers.0.self_attn.q_proj"] = {{"quant_algo", "FP8"}};
  layers["model.layers.0.mlp.shared_experts.up_proj"] = {{"quant_algo", "FP8"}};
  layers["mtp.layers.0.mlp.experts.0.up_proj"] = {{"quant_algo", "MXFP8"}};
  EXPECT_EQ(parse(config)->format, SourceFormat::kFloat);  // no expert is named
  EXPECT_EQ(parse(config)->quantization->of("model.layers.0.mlp.experts.0.up_proj")->algo, "");
  layers["model.layers.0.mlp.experts.0.up_proj"] = {{"quant_algo", "NVFP4"}, {"group_size", 16}};
  Result<ModelInfo> model = parse(config);
  ASSERT_OK(model);
  EXPECT_EQ(model->format, SourceFormat::kModelOpt);
  EXPECT_EQ(activations(model), ActivationFormat::kNvfp4);
  layers["model.layers.0.mlp.experts"] = {{"quant_algo", "W4A16_NVFP4"}, {"group_size", 16}};  // what contains them
  EXPECT_EQ(activations(parse(config), "model.layers.0.mlp.experts.1.up_proj"), ActivationFormat::kBf16);
  EXPECT_EQ(activations(parse(config)), ActivationFormat::kNvfp4);
  layers["model.layers.0.mlp.experts.1.up_proj"] = {{"quant_algo", "NVFP4"}, {"group_size", 32}};
  EXPECT_THAT(refusal(parse(config)).message(), HasSubstr("group_size: expected 16"));
}

TEST(Quantization, ModelOptGroupsWithoutInputActivationsAreWeightOnly) {
  json config = config_of("qwen3_moe");
  json& group = config["quantization_config"]["config_groups"]["group_0"];
  EXPECT_EQ(activations(parse(config)), ActivationFormat::kNvfp4);
  group["input_activations"] = nullptr;
  EXPECT_EQ(activations(parse(config)), ActivationFormat::kBf16);
  EXPECT_EQ(parse(config)->quantization->of("model.layers.0.mlp.experts.0.up_proj")->why,
            "config_groups group_0: input_activations is null");
  group.erase("input_activations");
  EXPECT_EQ(activations(parse(config)), ActivationFormat::kBf16);
  group["input_activations"] = {{"num_bits", 8}, {"type", "float"}};
  EXPECT_EQ(activations(parse(config)), ActivationFormat::kFp8);
  group["input_activations"] = {{"num_bits", 8}, {"type", "int"}};  // no format here but bf16 is as precise
  EXPECT_EQ(activations(parse(config)), ActivationFormat::kBf16);
}

// ModelOpt 0.47 writes "NVFP4", but "mxfp4".
TEST(Quantization, NamesAreReadInEitherCase) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (const char* algo : {"mxfp4", "MXFP4"}) {
    json config = builder.config();
    json file = builder.hf_quant_config();
    config["quantization_config"] = {{"quant_method", "ModelOpt"}, {"quant_algo", algo}, {"group_size", 32}};
    file["quantization"] = {{"quant_algo", "mxfp4"}, {"group_size", 32}};
    const Result<ModelInfo> model = parse(config, file);
    ASSERT_OK(refusal(model));
    EXPECT_EQ(model->format, SourceFormat::kMxfp4);
    EXPECT_EQ(model->quant_algo, "MXFP4");
  }
  json config = builder.config();
  config["quantization_config"]["quant_algo"] = "nvfp4";
  EXPECT_EQ(parse(config)->format, SourceFormat::kModelOpt);
  config["quantization_config"]["quant_algo"] = "nvfp4_awq";
  EXPECT_THAT(refusal(parse(config)).message(), HasSubstr("quant_algo NVFP4_AWQ: activations must be multiplied"));
  config = config_of("qwen3_moe", SourceFormat::kCompressedTensors);
  config["quantization_config"]["format"] = "NVFP4-pack-quantized";
  EXPECT_EQ(parse(config)->format, SourceFormat::kCompressedTensors);
}

// Names win over expressions, these in alphabetical order, and those over classes; `ignore` wins over all.
TEST(Quantization, CompressedTensorsTargetsAreMatchedAsTheirProducerDoes) {
  json config = config_of("qwen2_moe", SourceFormat::kCompressedTensors);
  json& groups = config["quantization_config"]["config_groups"];
  json weight_only = groups["group_0"];
  weight_only["input_activations"] = nullptr;
  groups["group_1"] = weight_only;
  const char* const up = "model.layers.0.mlp.experts.0.up_proj";
  const char* const down = "model.layers.12.mlp.experts.3.down_proj";
  const char* const shared = "model.layers.0.mlp.shared_expert.up_proj";
  const auto expect = [&](ActivationFormat of_up, ActivationFormat of_down, ActivationFormat of_shared) {
    const Result<ModelInfo> model = parse(config);
    EXPECT_EQ(activations(model, up), of_up);
    EXPECT_EQ(activations(model, down), of_down);
    EXPECT_EQ(activations(model, shared), of_shared);
  };
  constexpr ActivationFormat kW4A4 = ActivationFormat::kNvfp4, kW4A16 = ActivationFormat::kBf16;
  groups["group_0"]["targets"] = {"re:.*mlp[.]experts[.].*"};
  groups["group_1"]["targets"] = {"re:.*self_attn.*", "re:.*shared_expert[.].*"};
  expect(kW4A4, kW4A4, kW4A16);
  groups["group_0"]["targets"] = {"Linear"};
  expect(kW4A4, kW4A4, kW4A16);
  groups["group_1"]["targets"] = {"re:^(?!.*shared).*_proj$"};  // mentions no experts, and is theirs
  expect(kW4A16, kW4A16, kW4A4);
  groups["group_0"]["targets"] = {"re:^(?!.*experts).*_proj$", "Linear"};  // mentions experts, and is not theirs
  groups["group_1"]["targets"] = {"re:.*\\.experts\\.\\d+\\.down_proj"};
  expect(kW4A4, kW4A16, kW4A4);
  groups["group_0"]["targets"] = {"re:.*experts.*"};
  groups["group_1"]["targets"] = {"re:.*experts.*down_proj", down};  // "re:.*experts.*" is first, but for the name
  expect(kW4A4, kW4A16, kW4A16);                                     // nothing names the shared one: floats
  groups["group_1"]["targets"] = {"re:.*experts.*"};                 // the same target twice: the more precise
  expect(kW4A16, kW4A16, kW4A16);
  groups["group_1"]["targets"] = {"re:experts.*"};  // re.match begins at the beginning
  expect(kW4A4, kW4A4, kW4A16);
  config["quantization_config"]["ignore"] = {"re:.*shared_expert.*", up};
  EXPECT_EQ(parse(config)->quantization->of(shared)->algo, "");
  EXPECT_EQ(parse(config)->quantization->of(up)->algo, "");
  EXPECT_EQ(parse(config)->quantization->of(down)->algo, "NVFP4");
}

TEST(Quantization, CompressedTensorsGroups) {
  const json config = config_of("qwen3_moe", SourceFormat::kCompressedTensors);
  EXPECT_EQ(parse(config)->format, SourceFormat::kCompressedTensors);
  EXPECT_EQ(activations(parse(config)), ActivationFormat::kNvfp4);
  json changed = config;
  json& group = changed["quantization_config"]["config_groups"]["group_0"];
  group["input_activations"] = nullptr;
  EXPECT_EQ(activations(parse(changed)), ActivationFormat::kBf16);
  group["input_activations"] = {{"num_bits", 8}, {"type", "float"}};
  EXPECT_EQ(activations(parse(changed)), ActivationFormat::kFp8);
  group["input_activations"] = nullptr;
  group["weights"]["symmetric"] = false;
  EXPECT_THAT(refusal(parse(changed)).message(), HasSubstr("symmetric"));

  json mixed = config;  // FP8 attention beside NVFP4 experts
  json& quantization = mixed["quantization_config"];
  quantization["format"] = "mixed-precision";
  quantization["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized";
  quantization["config_groups"]["group_1"] = {{"format", "float-quantized"},
                                              {"targets", {"re:.*self_attn.*"}},
                                              {"weights", {{"num_bits", 8}, {"type", "float"}}}};
  EXPECT_EQ(parse(mixed)->format, SourceFormat::kCompressedTensors);
  EXPECT_OK(refusal(parse(mixed)));
  EXPECT_THAT(refusal(parse(mixed), "model.layers.0.self_attn.q_proj").message(),
              HasSubstr("config_groups group_1 weights: FP8 experts are not NVFP4"));
}

TEST(Quantization, OnlyRotationsOfTheExpertsActivationsAreRefused) {
  json config = config_of("qwen3_moe", SourceFormat::kCompressedTensors);
  json& groups = config["quantization_config"]["transform_config"]["config_groups"];
  const auto rotation = [&](const char* location, const char* target) {
    const json apply = {{"location", location}, {"targets", json::array({target})}};
    groups["R"] = {{"type", "hadamard"}, {"apply", json::array({apply})}};
    return parse(config)->quantization->rotation_of("model.layers.0.mlp.experts.0.down_proj");
  };
  EXPECT_OK(rotation("weight_input", "re:.*down_proj$"));  // SpinQuant's R1 and R2 are in the weights
  EXPECT_OK(rotation("weight_output", "Linear"));
  EXPECT_OK(rotation("input", "re:.*self_attn.*"));
  EXPECT_OK(rotation("q_attn", "re:.*self_attn$"));
  EXPECT_THAT(rotation("input", "re:.*down_proj$").message(),
              HasSubstr("transform_config R: activations must be rotated"));
  EXPECT_THAT(rotation("output", "Linear").message(), HasSubstr("Hadamard"));
}

TEST(Quantization, AFormatWithoutGroupsIsWeightOnly) {
  json config = config_of("qwen3_moe", SourceFormat::kCompressedTensors);
  config["quantization_config"].erase("config_groups");
  EXPECT_EQ(activations(parse(config)), ActivationFormat::kBf16);
  EXPECT_EQ(parse(config)->format, SourceFormat::kCompressedTensors);
}

ATTACK_TEST(kHostileFiles, Config, HostileTextIsAnError) {
  for (const char* text : {"", "{", "[]", "null", "3", "{\"model_type\": 3}", "{\"model_type\": \"qwen3_moe\"",
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
  for (const char* text : {"{\"quantization\": 3}", "{\"quantization\": {}}"}) {  // experts in floats need none
    attacked();
    EXPECT_EQ(refusal(parse_model_config(good, text)).code(), Code::kBadInput) << text;
  }
}

}  // namespace
}  // namespace nvfp4_moe
