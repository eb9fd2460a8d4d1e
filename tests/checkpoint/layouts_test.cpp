// Layouts that real producers write but the builder does not, and refused layouts.
#include <algorithm>

#include "checkpoint/experts.h"
#include "checkpoint/float_experts.h"

namespace nvfp4_moe::internal::test::layouts_test {
namespace {

// "experts.7.gate_proj." -> "experts.gate_proj.7.", as ModelOpt writes Qwen3-VL-MoE.
void turn_names(CheckpointBuilder& builder, int64_t layer) {
  const std::string stem = "model.layers." + std::to_string(layer) + ".mlp.experts.";
  for (int64_t e = 0; e < builder.options().num_experts; ++e) {
    for (const char* projection : {"gate", "up", "down"}) {
      for (const char* part : {"codes", "scales", "tensor_scale", "input_scale"}) {
        const std::string name = builder.tensor_name(layer, e, projection, part);
        auto node = builder.tensors().extract(name);
        node.key() =
            stem + projection + "_proj." + std::to_string(e) + name.substr(name.rfind('.'));
        builder.tensors().insert(std::move(node));
      }
    }
  }
}

TEST(Layouts, ProjectionBeforeTheExpertsNumber) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.config()["model_type"] = "qwen3_vl_moe";
  for (const int64_t layer : builder.layers()) turn_names(builder, layer);
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->model().layers, builder.layers());
  EXPECT_EQ(checkpoint->tensor_name(1, 5, "down"), "model.layers.1.mlp.experts.down_proj.5.weight");
  EXPECT_EQ(find(checkpoint->findings(), "missing_expert"), nullptr);
  for (int64_t e = 0; e < 8; ++e) {
    expect_same(checkpoint->expert(1, e), builder, 1, e);
  }
  EXPECT_TRUE(checkpoint->validate(1, {0, 8})->empty());
  EXPECT_TRUE(checkpoint->layer_scales(1)->hidden.has_value());
}

// The names of a layer's experts follow no single rule: the message explains the difference and
// names one of each kind.
TEST(Layouts, OneLayerHasOneKindOfNames) {
  const std::string first = "model.layers.0.mlp.experts.0.down_proj.input_scale";
  const struct {
    std::string added, says;
  } cases[] = {
      {"layers.0.mlp.experts.0.up_proj.weight",
       "in different places: layers.0.mlp.experts.0.up_proj.weight and " + first},
      {"model.layers.0.mlp.experts.gate_proj.3.weight",
       "some with the expert's number first, some with the projection first: " + first +
           " and model.layers.0.mlp.experts.gate_proj.3.weight"},
      {"model.layers.0.mlp.experts.down_proj_weight_scale",
       "some of one expert, some of a stack of all: " + first +
           " and model.layers.0.mlp.experts.down_proj_weight_scale"},
      {"model.layers.0.mlp.experts.0.w1.weight",
       "whose projections are called differently: " + first +
           " and model.layers.0.mlp.experts.0.w1.weight"},
  };
  for (const auto& c : cases) {
    CheckpointBuilder builder({.model_type = "qwen3_moe"});
    builder.tensors()[c.added] = {DType::kU8, {1}, {0}};
    EXPECT_EQ(refusal_of_open(builder).message(), "layer 0: experts under several names, " + c.says)
        << c.added;
  }
}

// gate_proj and up_proj of the shared expert as gate_up_proj, gate first.
void fuse_shared(CheckpointBuilder& builder, int64_t layer) {
  builder.matrix(layer, -1, "up").tensor_scale = builder.matrix(layer, -1, "gate").tensor_scale;
  auto& tensors = builder.tensors();
  for (const char* part : {"codes", "scales", "tensor_scale", "input_scale"}) {
    const std::string gate = builder.tensor_name(layer, -1, "gate", part);
    auto first = tensors.extract(gate);
    const auto second = tensors.extract(builder.tensor_name(layer, -1, "up", part));
    if (first.empty()) continue;
    if (first.mapped().shape.size() == 2) {
      first.mapped().shape[0] *= 2;
      first.mapped().bytes.insert(first.mapped().bytes.end(), second.mapped().bytes.begin(),
                                  second.mapped().bytes.end());
    }
    const size_t at = gate.find("gate_proj");
    first.key() = gate.substr(0, at) + "gate_up_proj" + gate.substr(at + 9);
    tensors.insert(std::move(first));
  }
}

TEST(Layouts, SharedExpertWithGateAndUpInOneTensor) {
  for (const SourceFormat format : {SourceFormat::kModelOpt, SourceFormat::kFloat}) {
    CheckpointBuilder builder({.model_type = "deepseek_v3", .format = format});
    CheckpointBuilder plain({.model_type = "deepseek_v3", .format = format});
    for (const int64_t layer : builder.layers()) {
      fuse_shared(builder, layer);
      plain.matrix(layer, -1, "up").tensor_scale = plain.matrix(layer, -1, "gate").tensor_scale;
    }
    const Opened fused(builder), apart(plain);
    EXPECT_EQ(find(fused->findings(), "shared_expert_not_loaded"), nullptr);
    const int64_t layer = builder.layers().front();
    EXPECT_EQ(fused->layer_options(layer)->shared_intermediate_size, 32);
    EXPECT_OK(fused->check_layout(layer, {0, 8}));
    for (const IntermediateSlice slice : {IntermediateSlice{}, {16, 16}}) {
      expect_same(fused->shared_expert(layer, slice), apart->shared_expert(layer, slice));
    }
  }
}

// Named as transformers writes MiniMax-M3; the config gives the shared expert its own size.
TEST(Layouts, MinimaxM3SharedExpert) {
  CheckpointBuilder builder({.model_type = "minimax_m3", .format = SourceFormat::kFloat});
  builder.config()["text_config"].update(
      {{"shared_intermediate_size", 32}, {"n_shared_experts", 1}});
  auto& tensors = builder.tensors();
  for (const int64_t layer : builder.layers()) {
    const auto routed = [&](const char* p) {
      return tensors.at(builder.tensor_name(layer, 2, p, "codes"));
    };
    const std::string stem = "language_model.model.layers." + std::to_string(layer) +
                             ".block_sparse_moe.shared_experts.";
    RawTensor both = routed("gate");
    const RawTensor up = routed("up");
    both.shape[0] *= 2;
    both.bytes.insert(both.bytes.end(), up.bytes.begin(), up.bytes.end());
    const RawTensor down = routed("down");
    tensors[stem + "gate_up_proj.weight"] = both;
    tensors[stem + "down_proj.weight"] = down;
  }
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->model().shared_experts, 1);
  expect_same(checkpoint->shared_expert(1), checkpoint->expert(1, 2));
}

TEST(Layouts, LayersThatAreNotSupportedAreNamedAndTheOthersOpen) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .layers = 3});
  for (int64_t e = 0; e < 8; ++e) {
    for (const char* projection : {"gate", "up", "down"}) {
      RawTensor& codes = builder.tensors().at(builder.tensor_name(0, e, projection, "codes"));
      codes.dtype = DType::kF8E4M3;
      codes.shape[1] *= 2;
      codes.bytes.resize(codes.bytes.size() * 2);
    }
  }
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{1, 2}));
  const Finding* finding = find(checkpoint->findings(), "layer_not_supported");
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->severity, Severity::kWarning);
  EXPECT_EQ(finding->layer, 0);
  EXPECT_EQ(finding->actual, "FP8 experts are not NVFP4");
  EXPECT_EQ(find(checkpoint->findings(), "missing_layer"), nullptr);
  const Status refused = checkpoint->expert(0, 0).status();
  EXPECT_EQ(refused.code(), Code::kUnsupported);
  EXPECT_EQ(refused.message(),
            "layer 0: model.layers.0.mlp.experts.0.gate_proj.weight: FP8 experts are not NVFP4");
  const auto loaded = must(checkpoint->expert(2, 7));
  expect_same(loaded->source.up, builder.matrix(2, 7, "up"));
}

TEST(Layouts, EachLayerHasTheFormatThatIsDeclaredForIt) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .layers = 3, .hf_quant_config = false});
  nlohmann::json layers;
  for (int64_t e = 0; e < 8; ++e) {
    for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string name = ".mlp.experts." + std::to_string(e) + "." + projection;
      layers["model.layers.0" + name] = {{"quant_algo", "FP8"}};
      layers["model.layers.1" + name] = {{"quant_algo", "NVFP4"}, {"group_size", 16}};
      layers["model.layers.2" + name] = {{"quant_algo", "w4a16_nvfp4"}, {"group_size", 16}};
    }
  }
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
  const auto open = [&] {
    const Opened checkpoint(builder);
    return std::pair(checkpoint->layer_options(0)->shared_intermediate_size,
                     checkpoint->findings());
  };
  EXPECT_EQ(open().first, 32);
  groups["group_1"]["input_activations"] = nullptr;
  const auto [size, findings] = open();
  EXPECT_EQ(size, 0);
  const Finding* finding = find(findings, "shared_expert_not_loaded");
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
      BuilderOptions options{.model_type = "qwen3_5_moe",
                             .format = SourceFormat::kFloat,
                             .stacked_floats = true,
                             .num_experts = 2,
                             .hidden_size = 64,
                             .intermediate_size = intermediate};
      CheckpointBuilder builder(options);
      for (const int64_t layer : builder.layers()) {
        for (const char* projection : {"gate", "down"}) {
          if (turned)
            turn_stack(builder.tensors().at(builder.tensor_name(layer, 0, projection, "codes")));
        }
      }
      const Opened checkpoint(builder);
      expect_same(checkpoint->expert(1, 1), builder, 1, 1);
      auto floats = must(float_expert(*checkpoint, 1, 1));
      std::vector<float> row(64);
      ASSERT_OK(floats->up.fetch());
      floats->up.read_row(3, row.data());
      for (size_t c = 0; c < row.size(); ++c)
        EXPECT_EQ(row[c], builder.matrix(1, 1, "up").weights[3 * 64 + c]) << c;
    }
  }
}

// gate and up in NVFP4, down in FP8: the error is an unsupported layer, not a missing tensor.
TEST(RefusedLayouts, ADownProjectionInFp8IsNamedAsSuch) {
  for (const SourceFormat format : {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors}) {
    CheckpointBuilder builder({.model_type = "qwen3_moe", .format = format});
    for (int64_t e = 0; e < 8; ++e) {
      auto node = builder.tensors().extract(builder.tensor_name(1, e, "down", "codes"));
      RawTensor& codes = node.mapped();
      codes.dtype = DType::kF8E4M3;
      codes.shape[1] *= 2;
      codes.bytes.resize(codes.bytes.size() * 2);
      node.key() = "model.layers.1.mlp.experts." + std::to_string(e) + ".down_proj.weight";
      builder.tensors().insert(std::move(node));
      builder.tensors().erase("model.layers.1.mlp.experts." + std::to_string(e) +
                              ".down_proj.weight_global_scale");
    }
    const Opened checkpoint(builder);
    EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{0}));
    EXPECT_THAT(
        checkpoint->expert(1, 0).status().message(),
        HasSubstr("'model.layers.1.mlp.experts.0.down_proj.weight', FP8 experts are not NVFP4"));
    EXPECT_OK(checkpoint->expert(0, 0));
  }
}

// If one expert of a layer has another format, the error names it by its stored tensors.
TEST(RefusedLayouts, AnExpertInAnotherFormatIsNotCalledMissing) {
  CheckpointBuilder builder(
      {.model_type = "qwen3_moe", .format = SourceFormat::kCompressedTensors});
  auto node = builder.tensors().extract(builder.tensor_name(1, 5, "down", "codes"));
  node.mapped().dtype = DType::kF8E4M3;
  node.key() = "model.layers.1.mlp.experts.5.down_proj.weight";
  builder.tensors().insert(std::move(node));
  const Opened checkpoint(builder);
  const auto& findings = checkpoint->findings();
  const auto finding = std::find_if(findings.begin(), findings.end(), [](const Finding& found) {
    return found.id == "missing_expert";
  });
  ASSERT_NE(finding, findings.end());
  EXPECT_EQ(finding->expert, 5);
  EXPECT_THAT(
      finding->actual,
      HasSubstr(
          "model.layers.1.mlp.experts.5.down_proj.weight in another format, (64, 16) F8_E4M3"));
}

// All layers have the config's number of experts; a layer that was pruned separately is an error
// that names it.
TEST(RefusedLayouts, ALayerWithFewerExpertsIsNamedAsSuch) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (const int64_t e : {6, 7}) {
    for (const char* projection : {"gate", "up", "down"})
      for (const char* part : {"codes", "scales", "tensor_scale", "input_scale"})
        builder.tensors().erase(builder.tensor_name(1, e, projection, part));
  }
  builder.tensors()["model.layers.1.mlp.gate.weight"] = {
      DType::kBf16, {6, 64}, std::vector<uint8_t>(6 * 64 * 2)};
  const Opened checkpoint(builder);
  EXPECT_THAT(checkpoint->check_layout(1, {0, 8}).message(),
              HasSubstr("a layer of 6 experts, as its router has"));
  EXPECT_OK(checkpoint->check_layout(0, {0, 8}));
}

// MLX's words and its `scales`, as mlx-lm converts a model.
TEST(RefusedLayouts, MlxIsRefusedByName) {
  for (const char* stem : {"model.layers.0.mlp.switch_mlp.", "model.layers.0.mlp.experts."}) {
    CheckpointBuilder builder(
        {.model_type = "qwen3_moe", .format = SourceFormat::kFloat, .layers = 1});
    std::erase_if(builder.tensors(), [](const auto& tensor) {
      return tensor.first.find(".experts.") != std::string::npos;
    });
    builder.tensors()[stem + std::string("gate_proj.weight")] = {
        DType::kU32, {1, 1, 8}, std::vector<uint8_t>(32)};
    builder.tensors()[stem + std::string("gate_proj.scales")] = {
        DType::kU8, {1, 1, 4}, std::vector<uint8_t>(4)};
    builder.config()["quantization"] = {{"group_size", 16}, {"bits", 4}, {"mode", "nvfp4"}};
    builder.config()["quantization_config"] = builder.config()["quantization"];
    EXPECT_THAT(refusal_of_open(builder), Refused(Code::kUnsupported, "MLX's layout"));
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::layouts_test
