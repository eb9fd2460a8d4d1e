// Families that stack experts under their own names load to the same experts as separate tensors.
#include <nlohmann/json.hpp>

#include "checkpoint/experts.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test::family_stacks_test {
namespace {

using nlohmann::json;

constexpr int64_t kExperts = 4;

struct Layout {
  const char* config;             // a merge patch
  std::string stem;               // of layer 0
  std::string gate_up, up, down;  // names under the stem; `up` is empty if both are one tensor
  GateUpOrder order = GateUpOrder::kGateFirst;
  bool k_first = false;
};

const Layout kStep{R"({"model_type": "step3p5", "moe_layers_enum": "0,1"})", "model.layers.0.moe",
                   "gate_proj", "up_proj", "down_proj"};

const char* const kDiffusionGemma = R"({"model_type": "diffusion_gemma", "hidden_act": null,
  "hidden_activation": "gelu_pytorch_tanh", "num_experts_per_tok": null, "top_k_experts": 2})";

std::vector<Layout> layouts() {
  return {
      kStep,
      {R"({"model_type": "granitemoe", "intermediate_size": 32})",
       "model.layers.0.block_sparse_moe", "input_linear", "", "output_linear"},
      {R"({"model_type": "aria_text", "intermediate_size": 32, "num_shared_experts": 0})",
       "language_model.model.layers.0.mlp.experts", "fc1", "", "fc2", GateUpOrder::kGateFirst,
       true},
      {R"({"model_type": "inkling_text", "mlp_layer_types": ["sparse", "sparse"]})",
       "model.llm.layers.0.mlp.experts", "w13_weight", "", "w2_weight", GateUpOrder::kInterleaved},
      {R"({"model_type": "zaya"})", "model.layers.0.mlp.experts", "gate_up_proj", "", "down_proj"},
      {kDiffusionGemma, "model.encoder.language_model.layers.0.experts", "gate_up_proj", "",
       "down_proj"},
      {kDiffusionGemma, "model.decoder.layers.0.experts", "gate_up_proj", "", "down_proj"},
  };
}

CheckpointBuilder plain_builder(SourceFormat format = SourceFormat::kFloat) {
  return CheckpointBuilder({.model_type = "qwen3_moe", .format = format, .num_experts = kExperts});
}

// "<stem of the layer>.<word>.<part>"; without a part if the word has one or the family none.
std::string stack_name(const Layout& layout, int64_t layer, const std::string& word,
                       const std::string& part = "weight") {
  std::string stem = layout.stem;
  stem[stem.find(".0.") + 1] = static_cast<char>('0' + layer);
  const bool dotted = word.find("_weight") == word.npos && word != "gate_up_proj" &&
                      !(word == "down_proj" && layout.gate_up == "gate_up_proj");
  return stem + "." + word + (dotted ? "." + part : "");
}

// The plain checkpoint's experts, restacked.
CheckpointBuilder stacked_builder(const Layout& layout,
                                  SourceFormat format = SourceFormat::kFloat) {
  CheckpointBuilder builder = plain_builder(format);
  builder.config().merge_patch(json::parse(layout.config));
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (const char* part : {"codes", "scales", "tensor_scale", "input_scale"}) {
      const std::string name = builder.tensor_name(layer, 0, "gate", part);
      const std::string suffix = name.substr(name.rfind('.') + 1);
      const bool one = layout.up.empty();
      RawTensor gate_up = take_stack(builder, layer, "gate", part,
                                     one ? std::optional(layout.order) : std::nullopt);
      if (gate_up.bytes.empty()) continue;
      RawTensor down = take_stack(builder, layer, "down", part);
      if (layout.k_first) turn_stack(gate_up), turn_stack(down);
      builder.tensors()[stack_name(layout, layer, layout.gate_up, suffix)] = gate_up;
      builder.tensors()[stack_name(layout, layer, layout.down, suffix)] = down;
      if (!one)
        builder.tensors()[stack_name(layout, layer, layout.up, suffix)] =
            take_stack(builder, layer, "up", part);
    }
  }
  return builder;
}

TEST(FamilyStacks, StacksUnderOtherNamesAreTheSameExperts) {
  const auto check = [](const Layout& layout, SourceFormat format) {
    SCOPED_TRACE(layout.config);
    const Opened expected(plain_builder(format)), checkpoint(stacked_builder(layout, format));
    EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{0, 1}));
    EXPECT_EQ(checkpoint->tensor_name(1, 2, "up"),
              stack_name(layout, 1, layout.up.empty() ? layout.gate_up : layout.up));
    for (int64_t e = 0; e < kExperts; ++e)
      expect_same(checkpoint->expert(1, e), expected->expert(1, e));
    EXPECT_TRUE(checkpoint->validate(1, {0, kExperts})->empty());
  };
  for (const Layout& layout : layouts()) check(layout, SourceFormat::kFloat);
  check(kStep, SourceFormat::kModelOpt);
}

ATTACK_TEST(kPlantedFaults, FamilyStacks, WrongStacksAreFoundByName) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.config);
    const std::string gate_up = stack_name(layout, 0, layout.gate_up),
                      down = stack_name(layout, 0, layout.down);
    const auto found = [&](auto change, const char* id) {
      CheckpointBuilder builder = stacked_builder(layout);
      change(builder.tensors());
      TempDir dir;
      ASSERT_OK(builder.write(dir.path().string()));
      const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
      attacked();
      if (!checkpoint.ok()) {
        EXPECT_EQ(checkpoint.status().code(), Code::kBadInput) << checkpoint.status().message();
        return;
      }
      EXPECT_NE(find(checkpoint->findings(), id), nullptr) << id;
      EXPECT_FALSE(checkpoint->check_layout(0, {0, kExperts}, false).ok());
    };
    found([&](auto& tensors) { tensors.erase(down); }, "missing_expert");
    found([&](auto& tensors) { tensors.erase(gate_up); }, "missing_expert");
    found(
        [&](auto& tensors) {
          tensors[down].shape[0] = kExperts - 1;
          tensors[down].bytes.resize(tensors[down].bytes.size() / kExperts * (kExperts - 1));
        },
        "shape_mismatch");
    found([&](auto& tensors) { std::swap(tensors[gate_up], tensors[down]); }, "shape_mismatch");
    // The same experts a second time, one by one.
    CheckpointBuilder builder = stacked_builder(layout);
    builder.tensors()[layout.stem + (layout.stem.ends_with("experts") ? ".0" : ".experts.0") +
                      ".gate_proj.weight"] = {DType::kBf16, {1}, {0, 0}};
    EXPECT_THAT(refusal_of_open(builder).message(), HasSubstr("experts under several names"));
    attacked();
  }
}

TEST(FamilyStacks, LimitsOfALayerAreItsOwn) {
  CheckpointBuilder builder = stacked_builder(kStep);
  builder.config()["swiglu_limits"] = {0, 7.0};
  const Opened checkpoint(builder);
  EXPECT_EQ(checkpoint->layer_options(0)->activation, Activation::kSwiglu);
  EXPECT_EQ(checkpoint->layer_options(1)->activation, Activation::kSwigluStep);
  EXPECT_EQ(checkpoint->layer_options(1)->swiglu_limit, 7.0f);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::family_stacks_test
