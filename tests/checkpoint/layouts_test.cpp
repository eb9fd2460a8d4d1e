// Layouts that real producers write but the builder does not, and refused layouts.
#include <nlohmann/json.hpp>

#include "checkpoint/experts.h"

namespace nvfp4_moe::internal::test::layouts_test {
namespace {

constexpr const char* kParts[] = {"codes", "scales", "tensor_scale", "input_scale"};

// "experts.7.gate_proj." -> "experts.gate_proj.7.", as ModelOpt writes Qwen3-VL-MoE.
TEST(Layouts, ProjectionBeforeTheExpertsNumber) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.config()["model_type"] = "qwen3_vl_moe";
  for (const int64_t layer : builder.layers()) {
    for (int64_t e = 0; e < 8; ++e) {
      for (const char* projection : {"gate", "up", "down"}) {
        for (const char* part : kParts) {
          const std::string name = builder.tensor_name(layer, e, projection, part);
          auto node = builder.tensors().extract(name);
          node.key() = name.substr(0, name.find("experts.") + 8) + projection + "_proj." +
                       std::to_string(e) + name.substr(name.rfind('.'));
          builder.tensors().insert(std::move(node));
        }
      }
    }
  }
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->model().layers, builder.layers());
  EXPECT_EQ(checkpoint->tensor_name(1, 5, "down"), "model.layers.1.mlp.experts.down_proj.5.weight");
  EXPECT_EQ(find(checkpoint->findings(), "missing_expert"), nullptr);
  for (int64_t e = 0; e < 8; ++e) expect_same(checkpoint->expert(1, e), builder, 1, e);
  EXPECT_TRUE(checkpoint->validate(1, {0, 8})->empty());
  EXPECT_TRUE(checkpoint->layer_scales(1)->hidden.has_value());
}

// The names of a layer's experts follow no single rule: the message explains the difference and
// names one of each kind.
TEST(Layouts, OneLayerHasOneKindOfNames) {
  const std::string first = "model.layers.0.mlp.experts.0.down_proj.input_scale";
  const std::pair<std::string, std::string> cases[] = {
      {"layers.0.mlp.experts.0.up_proj.weight",
       "in different places: layers.0.mlp.experts.0.up_proj.weight and " + first},
      {"model.layers.0.mlp.experts.gate_proj.3.weight",
       "some with the expert's number first, some with the projection first: " + first},
      {"model.layers.0.mlp.experts.down_proj_weight_scale",
       "some of one expert, some of a stack of all: " + first},
      {"model.layers.0.mlp.experts.0.w1.weight",
       "whose projections are called differently: " + first},
  };
  for (const auto& [added, words] : cases) {
    CheckpointBuilder builder({.model_type = "qwen3_moe"});
    builder.tensors()[added] = {DType::kU8, {1}, {0}};
    const std::string message = refusal_of_open(builder).message();
    EXPECT_THAT(message, StartsWith("layer 0: experts under several names, " + words));
    EXPECT_THAT(message, HasSubstr(added));
  }
}

// Named as transformers writes MiniMax-M3; the config gives the shared expert its own size.
TEST(Layouts, MinimaxM3SharedExpert) {
  CheckpointBuilder builder({.model_type = "minimax_m3", .format = SourceFormat::kFloat});
  builder.config()["text_config"].update(
      {{"shared_intermediate_size", 32}, {"n_shared_experts", 1}});
  auto& tensors = builder.tensors();
  for (const int64_t layer : builder.layers()) {
    const auto routed = [&](const char* projection) {
      return tensors.at(builder.tensor_name(layer, 2, projection, "codes"));
    };
    const std::string stem = "language_model.model.layers." + std::to_string(layer) +
                             ".block_sparse_moe.shared_experts.";
    RawTensor both = routed("gate");
    both.shape[0] *= 2;
    both.bytes = joined(both.bytes, routed("up").bytes, 0, GateUpOrder::kGateFirst);
    tensors[stem + "gate_up_proj.weight"] = both;
    tensors[stem + "down_proj.weight"] = routed("down");
  }
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->model().shared_experts, 1);
  expect_same(checkpoint->shared_expert(1), checkpoint->expert(1, 2));
}

// The codes of one projection of an expert as FP8 weights, under the name `weight`.
void make_fp8(CheckpointBuilder& builder, int64_t layer, int64_t expert, const char* projection) {
  const std::string name = builder.tensor_name(layer, expert, projection, "codes");
  auto node = builder.tensors().extract(name);
  node.mapped().dtype = DType::kF8E4M3;
  node.mapped().shape[1] *= 2;
  node.mapped().bytes.resize(node.mapped().bytes.size() * 2);
  node.key() = name.substr(0, name.rfind('.')) + ".weight";
  builder.tensors().insert(std::move(node));
}

TEST(Layouts, LayersThatAreNotSupportedAreNamedAndTheOthersOpen) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .layers = 3});
  for (int64_t e = 0; e < 8; ++e)
    for (const char* projection : {"gate", "up", "down"}) make_fp8(builder, 0, e, projection);
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{1, 2}));
  const Finding* finding = find(checkpoint->findings(), "layer_not_supported");
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->severity, Severity::kWarning);
  EXPECT_EQ(finding->layer, 0);
  EXPECT_EQ(find(checkpoint->findings(), "missing_layer"), nullptr);
  EXPECT_THAT(
      checkpoint->expert(0, 0),
      Refused(Code::kUnsupported,
              "layer 0: model.layers.0.mlp.experts.0.gate_proj.weight: FP8 experts are not NVFP4"));
  expect_same(checkpoint->expert(2, 7), builder, 2, 7);
}

TEST(Layouts, EachLayerHasTheFormatThatIsDeclaredForIt) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .layers = 3, .hf_quant_config = false});
  nlohmann::json layers;
  const char* const algorithms[] = {"FP8", "NVFP4", "w4a16_nvfp4"};
  for (int64_t layer = 0; layer < 3; ++layer)
    for (int64_t e = 0; e < 8; ++e)
      for (const char* projection : {"gate_proj", "up_proj", "down_proj"})
        layers["model.layers." + std::to_string(layer) + ".mlp.experts." + std::to_string(e) + "." +
               projection] = {{"quant_algo", algorithms[layer]}};
  builder.config()["quantization_config"] = {{"quant_method", "modelopt"},
                                             {"quant_algo", "mixed_precision"},
                                             {"quantized_layers", layers}};
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(checkpoint->layer_options(1)->activation_format, ActivationFormat::kNvfp4);
  EXPECT_EQ(checkpoint->layer_options(2)->activation_format, ActivationFormat::kBf16);
  EXPECT_THAT(checkpoint->expert(0, 0).status().message(),
              HasSubstr("quantized_layers: quant_algo FP8: FP8 experts are not NVFP4"));
}

// A layer quantizes the activations of both GEMMs or of neither.
TEST(Layouts, ASharedExpertWithOtherActivationsIsNotLoaded) {
  CheckpointBuilder builder(
      {.model_type = "qwen2_moe", .format = SourceFormat::kCompressedTensors});
  nlohmann::json& groups = builder.config()["quantization_config"]["config_groups"];
  groups["group_1"] = groups["group_0"];
  groups["group_0"]["targets"] = {"re:.*mlp.experts.*"};
  groups["group_1"]["targets"] = {"re:.*self_attn.*", "re:.*shared_expert.*"};
  EXPECT_EQ(Opened(builder)->layer_options(0)->shared_intermediate_size, 32);
  groups["group_1"]["input_activations"] = nullptr;
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->layer_options(0)->shared_intermediate_size, 0);
  const Finding* finding = find(checkpoint->findings(), "shared_expert_not_loaded");
  ASSERT_NE(finding, nullptr);
  EXPECT_THAT(finding->actual, HasSubstr("bf16 activations next to routed experts with nvfp4"));
}

// gate_up_proj is square if 2 I = H, down_proj if I = H: the other of the two then determines which
// axis is K.
TEST(Layouts, ASquareStackHasTheOrderOfTheOther) {
  for (const int64_t intermediate : {32, 64}) {
    for (const bool turned : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << "intermediate " << intermediate << (turned ? ", K is axis 1" : ""));
      CheckpointBuilder builder({.model_type = "qwen3_5_moe",
                                 .format = SourceFormat::kFloat,
                                 .stacked_floats = true,
                                 .num_experts = 2,
                                 .hidden_size = 64,
                                 .intermediate_size = intermediate});
      for (const int64_t layer : builder.layers())
        for (const char* projection : {"gate", "down"})
          if (turned)
            turn_stack(builder.tensors().at(builder.tensor_name(layer, 0, projection, "codes")));
      const Opened checkpoint(builder);
      expect_same(checkpoint->expert(1, 1), builder, 1, 1);
    }
  }
}

// gate and up in NVFP4, down in FP8: the error is an unsupported layer, not a missing tensor. If
// only one expert of a layer has another format, the error names it by its stored tensors.
TEST(RefusedLayouts, ADownProjectionInFp8IsNamedAsSuch) {
  for (const SourceFormat format : {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors}) {
    CheckpointBuilder builder({.model_type = "qwen3_moe", .format = format, .layers = 3});
    for (int64_t e = 0; e < 8; ++e) {
      make_fp8(builder, 1, e, "down");
      if (format == SourceFormat::kCompressedTensors)
        builder.tensors().erase(builder.tensor_name(1, e, "down", "tensor_scale"));
    }
    const bool one = format == SourceFormat::kCompressedTensors;
    if (one) make_fp8(builder, 2, 5, "down");
    const Opened checkpoint(builder);
    EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{0, 2}));
    EXPECT_THAT(
        checkpoint->expert(1, 0).status().message(),
        HasSubstr("'model.layers.1.mlp.experts.0.down_proj.weight', FP8 experts are not NVFP4"));
    EXPECT_OK(checkpoint->expert(0, 0));
    const Finding* finding = find(checkpoint->findings(), "missing_expert");
    ASSERT_EQ(finding != nullptr, one);
    if (!one) continue;
    EXPECT_EQ(finding->expert, 5);
    EXPECT_THAT(
        finding->actual,
        HasSubstr(
            "model.layers.2.mlp.experts.5.down_proj.weight in another format, (64, 32) F8_E4M3"));
  }
}

// All layers have the config's number of experts; a layer that was pruned separately is an error
// that names it.
TEST(RefusedLayouts, ALayerWithFewerExpertsIsNamedAsSuch) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (const int64_t e : {6, 7}) builder.plant(Plant::kMissingExpert, 1, e);
  builder.tensors()["model.layers.1.mlp.gate.weight"] = {
      DType::kBf16, {6, 64}, std::vector<uint8_t>(6 * 64 * 2)};
  const Opened checkpoint(builder);
  EXPECT_THAT(checkpoint->check_layout(1, {0, 8}).message(),
              HasSubstr("a layer of 6 experts, as its router has"));
  EXPECT_OK(checkpoint->check_layout(0, {0, 8}));
}

// MLX's words and its `scales`, as mlx-lm converts a model.
TEST(RefusedLayouts, MlxIsRefusedByName) {
  for (const std::string stem : {"model.layers.0.mlp.switch_mlp.", "model.layers.0.mlp.experts."}) {
    CheckpointBuilder builder(
        {.model_type = "qwen3_moe", .format = SourceFormat::kFloat, .layers = 1});
    std::erase_if(builder.tensors(), [](const auto& tensor) {
      return tensor.first.find(".experts.") != std::string::npos;
    });
    builder.tensors()[stem + "gate_proj.weight"] = {
        DType::kU32, {1, 1, 8}, std::vector<uint8_t>(32)};
    builder.tensors()[stem + "gate_proj.scales"] = {DType::kU8, {1, 1, 4}, std::vector<uint8_t>(4)};
    builder.config()["quantization"] = {{"group_size", 16}, {"bits", 4}, {"mode", "nvfp4"}};
    builder.config()["quantization_config"] = builder.config()["quantization"];
    EXPECT_THAT(refusal_of_open(builder), Refused(Code::kUnsupported, "MLX's layout"));
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::layouts_test
