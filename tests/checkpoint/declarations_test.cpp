// Declarations of the experts' quantization in config files.
#include <nlohmann/json.hpp>

#include "checkpoint/model_config.h"
#include "checkpoint/quant_config.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using nlohmann::json;

json declared_config(const char* type, SourceFormat format = SourceFormat::kModelOpt) {
  return CheckpointBuilder({.model_type = type, .format = format, .layers = 1, .num_experts = 4})
      .config();
}
Result<ModelInfo> parsed(const json& config, const json& hf_quant = nullptr) {
  return parse_model_config(config.dump(), hf_quant.is_null() ? "" : hf_quant.dump());
}

// The error for experts that are not floats.
Status refusal_of(const Result<ModelInfo>& model,
                  const char* module = "model.layers.0.mlp.experts.0.up_proj") {
  if (!model.ok()) return model.status();
  if (!model->quantization->refusal.ok()) return model->quantization->refusal;
  const Result<ModuleScheme> scheme = model->quantization->of(module);
  return scheme.ok() ? scheme->refusal : scheme.status();
}
ActivationFormat activations_of(const Result<ModelInfo>& model,
                                const char* module = "model.layers.0.mlp.experts.0.up_proj") {
  EXPECT_OK(refusal_of(model, module));
  return model->quantization->of(module)->activation_format;
}

TEST(Quantization, AlgorithmsThatDecodeOtherwiseAreRefusedByName) {
  for (const char* algo : {"NVFP4_AWQ", "NVFP4_SVD", "FP8", "INT4_AWQ", "SOMETHING"}) {
    json config = declared_config("qwen3_moe");
    config["quantization_config"]["quant_algo"] = algo;
    const Status status = refusal_of(parsed(config));
    EXPECT_THAT(status, Refused(Code::kUnsupported, algo));
    EXPECT_THAT(status.message(), HasSubstr("config.json quantization_config: "));
  }
  for (const char* method : {"awq", "gptq", "bitsandbytes", "fp8"}) {
    json config = declared_config("qwen3_moe");
    config["quantization_config"]["quant_method"] = method;
    EXPECT_THAT(refusal_of(parsed(config)), Refused(Code::kUnsupported, method));
  }
}

TEST(Quantization, Fp8ActivationsAreDeclaredAndNotRefused) {
  for (const char* algo : {"W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8"}) {
    json config = declared_config("qwen3_moe");
    config["quantization_config"] = {{"quant_method", "modelopt"}, {"quant_algo", algo}};
    EXPECT_EQ(activations_of(parsed(config)), ActivationFormat::kFp8) << algo;
  }
  json config = declared_config("deepseek_v4", SourceFormat::kMxfp4);
  EXPECT_EQ(activations_of(parsed(config), "layers.0.ffn.experts.0.w1"), ActivationFormat::kFp8);
}

TEST(Quantization, GroupSizesOtherThan16AreRefused) {
  json config = declared_config("qwen3_moe");
  config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32;
  EXPECT_THAT(refusal_of(parsed(config)),
              Refused(Code::kUnsupported, "group_size: expected 16 for NVFP4, got 32"));
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.hf_quant_config()["quantization"]["group_size"] = 128;
  EXPECT_THAT(refusal_of(parsed(builder.config(), builder.hf_quant_config())).message(),
              HasSubstr("hf_quant_config.json: group_size: expected 16 for NVFP4, got 128"));
  config = declared_config("qwen3_moe", SourceFormat::kCompressedTensors);
  config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32;
  EXPECT_THAT(refusal_of(parsed(config)).message(),
              HasSubstr("group_size: expected 16 for NVFP4, got 32"));
}

TEST(Quantization, BothFilesMustAgree) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  EXPECT_OK(refusal_of(parsed(builder.config(), builder.hf_quant_config())));
  EXPECT_EQ(parsed(builder.config(), builder.hf_quant_config())->producer, "modelopt 0.47.0");
  json config = builder.config();
  config.erase("quantization_config");
  auto only_file = must(parsed(config, builder.hf_quant_config()));
  EXPECT_EQ(only_file->format, SourceFormat::kModelOpt);
  EXPECT_EQ(only_file->producer, "modelopt 0.47.0");
  builder.hf_quant_config()["quantization"]["quant_algo"] = "W4A16_NVFP4";
  EXPECT_EQ(activations_of(parsed(config, builder.hf_quant_config())), ActivationFormat::kBf16);
  EXPECT_THAT(refusal_of(parsed(builder.config(), builder.hf_quant_config())),
              Refused(Code::kBadInput, "expected 'NVFP4' as in config.json, got 'W4A16_NVFP4'"));
}

TEST(Quantization, MixedPrecisionIsReadForTheExpertsAlone) {
  json config = declared_config("qwen3_moe");
  json& quantization = config["quantization_config"];
  quantization = {{"quant_method", "modelopt"}, {"quant_algo", "MIXED_PRECISION"}};
  EXPECT_THAT(refusal_of(parsed(config)).message(), HasSubstr("quantized_layers: missing"));
  json& layers = quantization["quantized_layers"];
  layers["model.layers.0.self_attn.q_proj"] = {{"quant_algo", "FP8"}};
  layers["model.layers.0.mlp.shared_experts.up_proj"] = {{"quant_algo", "FP8"}};
  layers["mtp.layers.0.mlp.experts.0.up_proj"] = {{"quant_algo", "MXFP8"}};
  EXPECT_EQ(parsed(config)->format, SourceFormat::kFloat);  // no expert is named
  EXPECT_EQ(parsed(config)->quantization->of("model.layers.0.mlp.experts.0.up_proj")->algo, "");
  layers["model.layers.0.mlp.experts.0.up_proj"] = {{"quant_algo", "NVFP4"}, {"group_size", 16}};
  auto model = must(parsed(config));
  EXPECT_EQ(model->format, SourceFormat::kModelOpt);
  EXPECT_EQ(activations_of(model), ActivationFormat::kNvfp4);
  layers["model.layers.0.mlp.experts"] = {{"quant_algo", "W4A16_NVFP4"},
                                          {"group_size", 16}};  // what contains them
  EXPECT_EQ(activations_of(parsed(config), "model.layers.0.mlp.experts.1.up_proj"),
            ActivationFormat::kBf16);
  EXPECT_EQ(activations_of(parsed(config)), ActivationFormat::kNvfp4);
  layers["model.layers.0.mlp.experts.1.up_proj"] = {{"quant_algo", "NVFP4"}, {"group_size", 32}};
  EXPECT_THAT(refusal_of(parsed(config)).message(), HasSubstr("group_size: expected 16"));
}

TEST(Quantization, ModelOptGroupsWithoutInputActivationsAreWeightOnly) {
  json config = declared_config("qwen3_moe");
  json& group = config["quantization_config"]["config_groups"]["group_0"];
  EXPECT_EQ(activations_of(parsed(config)), ActivationFormat::kNvfp4);
  group["input_activations"] = nullptr;
  EXPECT_EQ(activations_of(parsed(config)), ActivationFormat::kBf16);
  EXPECT_EQ(parsed(config)->quantization->of("model.layers.0.mlp.experts.0.up_proj")->why,
            "config_groups group_0: input_activations is null");
  group.erase("input_activations");
  EXPECT_EQ(activations_of(parsed(config)), ActivationFormat::kBf16);
  group["input_activations"] = {{"num_bits", 8}, {"type", "float"}};
  EXPECT_EQ(activations_of(parsed(config)), ActivationFormat::kFp8);
  group["input_activations"] = {{"num_bits", 8},
                                {"type", "int"}};  // of the formats here only bf16 is as precise
  EXPECT_EQ(activations_of(parsed(config)), ActivationFormat::kBf16);
}

// ModelOpt 0.47 writes "NVFP4", but "mxfp4".
TEST(Quantization, NamesAreReadInEitherCase) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (const char* algo : {"mxfp4", "MXFP4"}) {
    json config = builder.config();
    json file = builder.hf_quant_config();
    config["quantization_config"] = {
        {"quant_method", "ModelOpt"}, {"quant_algo", algo}, {"group_size", 32}};
    file["quantization"] = {{"quant_algo", "mxfp4"}, {"group_size", 32}};
    const Result<ModelInfo> model = parsed(config, file);
    ASSERT_OK(refusal_of(model));
    EXPECT_EQ(model->format, SourceFormat::kMxfp4);
    EXPECT_EQ(model->quant_algo, "MXFP4");
  }
  json config = builder.config();
  config["quantization_config"]["quant_algo"] = "nvfp4";
  EXPECT_EQ(parsed(config)->format, SourceFormat::kModelOpt);
  config["quantization_config"]["quant_algo"] = "nvfp4_awq";
  EXPECT_THAT(refusal_of(parsed(config)).message(),
              HasSubstr("quant_algo NVFP4_AWQ: activations must be multiplied"));
  config = declared_config("qwen3_moe", SourceFormat::kCompressedTensors);
  config["quantization_config"]["format"] = "NVFP4-pack-quantized";
  EXPECT_EQ(parsed(config)->format, SourceFormat::kCompressedTensors);
}

// Names win over expressions, these in alphabetical order, and those over classes; `ignore` wins
// over all.
TEST(Quantization, CompressedTensorsTargetsAreMatchedAsTheirProducerDoes) {
  json config = declared_config("qwen2_moe", SourceFormat::kCompressedTensors);
  json& groups = config["quantization_config"]["config_groups"];
  json weight_only = groups["group_0"];
  weight_only["input_activations"] = nullptr;
  groups["group_1"] = weight_only;
  const char* const up = "model.layers.0.mlp.experts.0.up_proj";
  const char* const down = "model.layers.12.mlp.experts.3.down_proj";
  const char* const shared = "model.layers.0.mlp.shared_expert.up_proj";
  const auto expect = [&](ActivationFormat of_up, ActivationFormat of_down,
                          ActivationFormat of_shared) {
    const Result<ModelInfo> model = parsed(config);
    EXPECT_EQ(activations_of(model, up), of_up);
    EXPECT_EQ(activations_of(model, down), of_down);
    EXPECT_EQ(activations_of(model, shared), of_shared);
  };
  constexpr ActivationFormat kW4A4 = ActivationFormat::kNvfp4, kW4A16 = ActivationFormat::kBf16;
  groups["group_0"]["targets"] = {"re:.*mlp[.]experts[.].*"};
  groups["group_1"]["targets"] = {"re:.*self_attn.*", "re:.*shared_expert[.].*"};
  expect(kW4A4, kW4A4, kW4A16);
  groups["group_0"]["targets"] = {"Linear"};
  expect(kW4A4, kW4A4, kW4A16);
  groups["group_1"]["targets"] = {
      "re:^(?!.*shared).*_proj$"};  // mentions no experts, but applies to them
  expect(kW4A16, kW4A16, kW4A4);
  groups["group_0"]["targets"] = {"re:^(?!.*experts).*_proj$",
                                  "Linear"};  // mentions experts, but does not apply to them
  groups["group_1"]["targets"] = {"re:.*\\.experts\\.\\d+\\.down_proj"};
  expect(kW4A4, kW4A16, kW4A4);
  groups["group_0"]["targets"] = {"re:.*experts.*"};
  groups["group_1"]["targets"] = {"re:.*experts.*down_proj",
                                  down};  // "re:.*experts.*" comes first, but the name wins
  expect(kW4A4, kW4A16, kW4A16);          // no entry names the shared expert: floats
  groups["group_1"]["targets"] = {"re:.*experts.*"};  // comes first, but the name wins
  expect(kW4A16, kW4A16, kW4A16);
  groups["group_1"]["targets"] = {"re:experts.*"};  // re.match begins at the beginning
  expect(kW4A4, kW4A4, kW4A16);
  config["quantization_config"]["ignore"] = {"re:.*shared_expert.*", up};
  EXPECT_EQ(parsed(config)->quantization->of(shared)->algo, "");
  EXPECT_EQ(parsed(config)->quantization->of(up)->algo, "");
  EXPECT_EQ(parsed(config)->quantization->of(down)->algo, "NVFP4");
}

TEST(Quantization, CompressedTensorsGroups) {
  const json config = declared_config("qwen3_moe", SourceFormat::kCompressedTensors);
  EXPECT_EQ(parsed(config)->format, SourceFormat::kCompressedTensors);
  EXPECT_EQ(activations_of(parsed(config)), ActivationFormat::kNvfp4);
  json changed = config;
  json& group = changed["quantization_config"]["config_groups"]["group_0"];
  group["input_activations"] = nullptr;
  EXPECT_EQ(activations_of(parsed(changed)), ActivationFormat::kBf16);
  group["input_activations"] = {{"num_bits", 8}, {"type", "float"}};
  EXPECT_EQ(activations_of(parsed(changed)), ActivationFormat::kFp8);
  group["input_activations"] = nullptr;
  group["weights"]["symmetric"] = false;
  EXPECT_THAT(refusal_of(parsed(changed)).message(), HasSubstr("symmetric"));

  json mixed = config;  // FP8 attention next to NVFP4 experts
  json& quantization = mixed["quantization_config"];
  quantization["format"] = "mixed-precision";
  quantization["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized";
  quantization["config_groups"]["group_1"] = {{"format", "float-quantized"},
                                              {"targets", {"re:.*self_attn.*"}},
                                              {"weights", {{"num_bits", 8}, {"type", "float"}}}};
  EXPECT_EQ(parsed(mixed)->format, SourceFormat::kCompressedTensors);
  EXPECT_OK(refusal_of(parsed(mixed)));
  EXPECT_THAT(refusal_of(parsed(mixed), "model.layers.0.self_attn.q_proj").message(),
              HasSubstr("config_groups group_1 weights: FP8 experts are not NVFP4"));
}

TEST(Quantization, OnlyRotationsOfTheExpertsActivationsAreRefused) {
  json config = declared_config("qwen3_moe", SourceFormat::kCompressedTensors);
  json& groups = config["quantization_config"]["transform_config"]["config_groups"];
  const auto rotation = [&](const char* location, const char* target) {
    const json apply = {{"location", location}, {"targets", json::array({target})}};
    groups["R"] = {{"type", "hadamard"}, {"apply", json::array({apply})}};
    return parsed(config)->quantization->rotation_of("model.layers.0.mlp.experts.0.down_proj");
  };
  EXPECT_OK(
      rotation("weight_input", "re:.*down_proj$"));  // SpinQuant's R1 and R2 are in the weights
  EXPECT_OK(rotation("weight_output", "Linear"));
  EXPECT_OK(rotation("input", "re:.*self_attn.*"));
  EXPECT_OK(rotation("q_attn", "re:.*self_attn$"));
  EXPECT_THAT(rotation("input", "re:.*down_proj$").message(),
              HasSubstr("transform_config R: activations must be rotated"));
  EXPECT_THAT(rotation("output", "Linear").message(), HasSubstr("Hadamard"));
}

TEST(Quantization, AFormatWithoutGroupsIsWeightOnly) {
  json config = declared_config("qwen3_moe", SourceFormat::kCompressedTensors);
  config["quantization_config"].erase("config_groups");
  EXPECT_EQ(activations_of(parsed(config)), ActivationFormat::kBf16);
  EXPECT_EQ(parsed(config)->format, SourceFormat::kCompressedTensors);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
