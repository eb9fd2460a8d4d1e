// Declarations of the experts' quantization in config files.
#include "checkpoint/configs.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr const char* kUpProj = "model.layers.0.mlp.experts.0.up_proj";
constexpr SourceFormat kCompressed = SourceFormat::kCompressedTensors;

// The error for experts that are not floats.
Status refusal_of(const Result<ModelInfo>& model, const char* module = kUpProj) {
  if (!model.ok()) return model.status();
  if (!model->quantization->refusal.ok()) return model->quantization->refusal;
  const Result<ModuleScheme> scheme = model->quantization->of(module);
  return scheme.ok() ? scheme->refusal : scheme.status();
}

// "nvfp4": the module's activations. "floats" if it is not quantized. Or why it is refused.
std::string declared(const Result<ModelInfo>& model, const char* module = kUpProj) {
  const Status refusal = refusal_of(model, module);
  if (!refusal.ok())
    return (refusal.code() == Code::kUnsupported ? "unsupported: " : "bad input: ") +
           refusal.message();
  const ModuleScheme scheme = *model->quantization->of(module);
  return scheme.algo.empty() ? "floats" : to_string(scheme.activation_format);
}

TEST(Quantization, IsDeclaredOrRefusedByName) {
  const struct {
    SourceFormat base;
    const char *patch, *expected;  // of quantization_config
    const char* type = "qwen3_moe";
    const char* module = kUpProj;
  } cases[] = {
      {SourceFormat::kModelOpt, "{}", "nvfp4"},
      // Algorithms that decode otherwise.
      {SourceFormat::kModelOpt, R"({"quant_algo": "NVFP4_AWQ"})",
       "unsupported: config.json quantization_config: quant_algo NVFP4_AWQ: activations must be"},
      {SourceFormat::kModelOpt, R"({"quant_algo": "FP8"})", "FP8 experts are not NVFP4"},
      {SourceFormat::kModelOpt, R"({"quant_algo": "SOMETHING"})", "SOMETHING"},
      {SourceFormat::kModelOpt, R"({"quant_method": "gptq"})", "unsupported"},
      // FP8 activations.
      {SourceFormat::kModelOpt, R"({"quant_algo": "W4A8_NVFP4_FP8", "config_groups": null})",
       "fp8"},
      {SourceFormat::kModelOpt, R"({"quant_algo": "W4A8_MXFP4_FP8", "config_groups": null})",
       "fp8"},
      {SourceFormat::kMxfp4, "{}", "fp8", "deepseek_v4", "layers.0.ffn.experts.0.w1"},
      // MiniMax-M3.1: MXFP8, with the experts in compressed-tensors' NVFP4.
      {SourceFormat::kModelOpt,
       R"({"quant_method": "mxfp8", "moe_quant_algo": "NVFP4", "quant_algo": null,
           "moe_quant_format": "nvfp4-pack-quantized"})",
       "nvfp4"},
      {SourceFormat::kModelOpt, R"({"moe_quant_algo": "NVFP4", "moe_quant_format": "pack-2"})",
       "unsupported: config.json quantization_config: moe_quant_format 'pack-2' is not known"},
      {SourceFormat::kModelOpt, R"({"quant_method": "mxfp8"})",
       "quant_method 'mxfp8' is not known"},
      // ModelOpt 0.47 writes "NVFP4", but "mxfp4": names are read in either case.
      {SourceFormat::kModelOpt, R"({"quant_method": "ModelOpt", "quant_algo": "nvfp4"})", "nvfp4"},
      {SourceFormat::kModelOpt,
       R"({"quant_algo": "mxfp4", "group_size": 32, "config_groups": null})", "bf16"},
      {kCompressed, R"({"format": "NVFP4-pack-quantized"})", "nvfp4"},
      // Group sizes.
      {SourceFormat::kModelOpt,
       R"({"config_groups": {"group_0": {"weights": {"group_size": 32}}}})",
       "unsupported: config.json quantization_config: config_groups group_0 weights group_size: "
       "expected 16 for NVFP4, got 32"},
      {kCompressed, R"({"config_groups": {"group_0": {"weights": {"group_size": 32}}}})",
       "group_size: expected 16 for NVFP4, got 32"},
      // Groups without input activations are weight-only.
      {SourceFormat::kModelOpt, R"({"config_groups": {"group_0": {"input_activations": null}}})",
       "bf16"},
      {SourceFormat::kModelOpt,
       R"({"config_groups": {"group_0": {"input_activations": {"num_bits": 8}}}})", "fp8"},
      // Only bf16 is as precise as INT8 activations.
      {SourceFormat::kModelOpt, R"({"config_groups": {"group_0": {"input_activations":
         {"num_bits": 8, "type": "int"}}}})",
       "bf16"},
      {kCompressed, "{}", "nvfp4"},
      {kCompressed, R"({"config_groups": null})", "bf16"},
      {kCompressed, R"({"config_groups": {"group_0": {"input_activations": null}}})", "bf16"},
      {kCompressed, R"({"config_groups": {"group_0": {"input_activations":
         {"num_bits": 8, "type": "float", "dynamic": true}}}})",
       "fp8"},
      {kCompressed, R"({"config_groups": {"group_0": {"weights": {"symmetric": false}}}})",
       "symmetric"},
  };
  for (const auto& one : cases) {
    json config = config_of(one.type, "{}", one.base);
    config["quantization_config"].merge_patch(json::parse(one.patch));
    EXPECT_THAT(declared(parsed(config), one.module), HasSubstr(one.expected)) << one.patch;
  }
}

TEST(Quantization, BothFilesMustAgree) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  json config = builder.config(), file = builder.hf_quant_config();
  EXPECT_EQ(declared(parsed(config, file)), "nvfp4");
  EXPECT_EQ(parsed(config, file)->producer, "modelopt 0.47.0");
  file["quantization"]["group_size"] = 128;
  EXPECT_THAT(declared(parsed(config, file)),
              HasSubstr("hf_quant_config.json: group_size: expected 16 for NVFP4, got 128"));
  file = builder.hf_quant_config();
  file["quantization"]["quant_algo"] = "W4A16_NVFP4";
  EXPECT_THAT(declared(parsed(config, file)),
              HasSubstr("bad input: hf_quant_config.json quant_algo: expected 'NVFP4' as in"));
  config.erase("quantization_config");
  EXPECT_EQ(declared(parsed(config, file)), "bf16");
  EXPECT_EQ(parsed(config, file)->format, SourceFormat::kModelOpt);
  EXPECT_EQ(parsed(config, file)->producer, "modelopt 0.47.0");
}

TEST(Quantization, MixedPrecisionIsReadOnlyForTheExperts) {
  json config = config_of("qwen3_moe");
  json& quantization = config["quantization_config"];
  quantization = {{"quant_method", "modelopt"}, {"quant_algo", "MIXED_PRECISION"}};
  EXPECT_THAT(declared(parsed(config)), HasSubstr("quantized_layers: missing"));
  json& layers = quantization["quantized_layers"];
  layers["model.layers.0.self_attn.q_proj"] = {{"quant_algo", "FP8"}};
  layers["model.layers.0.mlp.shared_experts.up_proj"] = {{"quant_algo", "FP8"}};
  layers["mtp.layers.0.mlp.experts.0.up_proj"] = {{"quant_algo", "MXFP8"}};
  EXPECT_EQ(parsed(config)->format, SourceFormat::kFloat);  // no expert is named
  EXPECT_EQ(declared(parsed(config)), "floats");
  layers[kUpProj] = {{"quant_algo", "NVFP4"}, {"group_size", 16}};
  EXPECT_EQ(parsed(config)->format, SourceFormat::kModelOpt);
  layers["model.layers.0.mlp.experts"] = {{"quant_algo", "W4A16_NVFP4"}, {"group_size", 16}};
  EXPECT_EQ(declared(parsed(config), "model.layers.0.mlp.experts.1.up_proj"), "bf16");
  EXPECT_EQ(declared(parsed(config)), "nvfp4") << "the module's own entry wins";
  layers["model.layers.0.mlp.experts.1.up_proj"] = {{"quant_algo", "NVFP4"}, {"group_size", 32}};
  EXPECT_THAT(declared(parsed(config)), HasSubstr("group_size: expected 16"));
}

// Names win over expressions, these in alphabetical order, and those over classes; `ignore` wins
// over all.
TEST(Quantization, CompressedTensorsTargetsAreMatchedAsTheirProducerDoes) {
  json config = config_of("qwen2_moe", "{}", kCompressed);
  json& groups = config["quantization_config"]["config_groups"];
  groups["group_1"] = groups["group_0"];
  groups["group_1"]["input_activations"] = nullptr;
  const char* const down = "model.layers.12.mlp.experts.3.down_proj";
  const char* const shared = "model.layers.0.mlp.shared_expert.up_proj";
  const struct {
    json nvfp4, weight_only;  // targets of the two groups
    const char *up, *down, *shared;
  } cases[] = {
      {{"re:.*mlp[.]experts[.].*"},
       {"re:.*self_attn.*", "re:.*shared_expert[.].*"},
       "nvfp4",
       "nvfp4",
       "bf16"},
      {{"Linear"}, {"re:.*self_attn.*", "re:.*shared_expert[.].*"}, "nvfp4", "nvfp4", "bf16"},
      // Mentions no experts, but applies to them; and the other way round.
      {{"Linear"}, {"re:^(?!.*shared).*_proj$"}, "bf16", "bf16", "nvfp4"},
      {{"re:^(?!.*experts).*_proj$", "Linear"},
       {"re:.*\\.experts\\.\\d+\\.down_proj"},
       "nvfp4",
       "bf16",
       "nvfp4"},
      // "re:.*experts.*" comes first, but the name wins. No entry names the shared expert.
      {{"re:.*experts.*"}, {"re:.*experts.*down_proj", down}, "nvfp4", "bf16", "floats"},
      {{"re:.*experts.*"}, {"re:experts.*"}, "nvfp4", "nvfp4", "floats"},  // re.match
  };
  for (const auto& one : cases) {
    groups["group_0"]["targets"] = one.nvfp4;
    groups["group_1"]["targets"] = one.weight_only;
    SCOPED_TRACE(groups.dump());
    const auto model = parsed(config);
    EXPECT_EQ(declared(model, kUpProj), one.up);
    EXPECT_EQ(declared(model, down), one.down);
    EXPECT_EQ(declared(model, shared), one.shared);
  }
  config["quantization_config"]["ignore"] = {"re:.*shared_expert.*", kUpProj};
  EXPECT_EQ(declared(parsed(config), shared), "floats");
  EXPECT_EQ(declared(parsed(config), kUpProj), "floats");
  EXPECT_EQ(declared(parsed(config), down), "nvfp4");
}

// FP8 attention next to NVFP4 experts.
TEST(Quantization, EachGroupOfCompressedTensorsHasItsFormat) {
  json config = config_of("qwen3_moe", "{}", kCompressed);
  config["quantization_config"].merge_patch(json::parse(R"({
    "format": "mixed-precision",
    "config_groups": {
      "group_0": {"format": "nvfp4-pack-quantized"},
      "group_1": {"format": "float-quantized", "targets": ["re:.*self_attn.*"],
                  "weights": {"num_bits": 8, "type": "float"}}}})"));
  EXPECT_EQ(parsed(config)->format, kCompressed);
  EXPECT_EQ(declared(parsed(config)), "nvfp4");
  EXPECT_THAT(declared(parsed(config), "model.layers.0.self_attn.q_proj"),
              HasSubstr("config_groups group_1 weights: FP8 experts are not NVFP4"));
}

TEST(Quantization, OnlyRotationsOfTheExpertsActivationsAreRefused) {
  json config = config_of("qwen3_moe", "{}", kCompressed);
  json& groups = config["quantization_config"]["transform_config"]["config_groups"];
  const auto rotation = [&](const char* location, const char* target) {
    const json apply = {{"location", location}, {"targets", json::array({target})}};
    groups["R"] = {{"type", "hadamard"}, {"apply", json::array({apply})}};
    return parsed(config)->quantization->rotation_of("model.layers.0.mlp.experts.0.down_proj");
  };
  EXPECT_OK(rotation("weight_input", "re:.*down_proj$"));  // SpinQuant's R1 and R2: in the weights
  EXPECT_OK(rotation("weight_output", "Linear"));
  EXPECT_OK(rotation("input", "re:.*self_attn.*"));
  EXPECT_THAT(rotation("input", "re:.*down_proj$").message(),
              HasSubstr("transform_config R: activations must be rotated"));
  EXPECT_THAT(rotation("output", "Linear").message(), HasSubstr("Hadamard"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
