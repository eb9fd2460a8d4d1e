// Tensors in an experts' module that belong to no format: the layer is refused by name unless they
// are harmless or accepted.
#include "checkpoint/other_tensors.h"

#include "checkpoint/experts.h"

namespace nvfp4_moe::internal::test::other_tensors_test {
namespace {

// A checkpoint with additional tensors.
CheckpointBuilder builder_with(const char* model_type, const std::vector<std::string>& names) {
  CheckpointBuilder builder({.model_type = model_type});
  for (const std::string& name : names)
    builder.tensors()[name] = {DType::kF32, {2}, std::vector<uint8_t>(8)};
  return builder;
}

const std::string kLayer = "model.layers.1.mlp.experts.";
const std::string kExpert = kLayer + "3.";

TEST(OtherTensors, OneThatMayChangeTheResultRefusesTheLayerByName) {
  for (const std::string& name :
       {kExpert + "up_proj.lora_A.weight", kExpert + "up_proj.lora_B.default.weight",
        kExpert + "down_proj.smoothing_factor", kExpert + "gate_proj.input_channel_scale",
        kExpert + "up_proj.bias", kExpert + "up_proj.pre_quant_scale",
        kExpert + "up_proj.weight_zero_point", kExpert + "up_proj.input_quantizer._pre_quant_scale",
        kExpert + "up_proj.weight_quantizer._svdquant_lora_a", kExpert + "rotation",
        kLayer + "lora_A", kLayer + "gate_up_proj_bias", kLayer + "gate_up_proj_lora_A",
        "base_model.model." + kExpert + "up_proj.lora_A.weight",
        kExpert + "up_proj.weight_global_scale"}) {
    SCOPED_TRACE(name);
    const Opened checkpoint(builder_with("qwen3_moe", {name}));
    const Finding* finding = find(checkpoint->findings(), "unknown_expert_tensor");
    ASSERT_NE(finding, nullptr);
    EXPECT_EQ(finding->severity, Severity::kError);
    EXPECT_EQ(finding->tensor, name);
    EXPECT_EQ(finding->layer, 1);
    EXPECT_THAT(finding->actual, HasSubstr("accept_tensors, --accept-tensor"));
    EXPECT_THAT(checkpoint->expert(1, 0), Refused(Code::kUnsupported, name));
    EXPECT_FALSE(checkpoint->check_layout(1, {0, 8}).ok());
    EXPECT_NE(find(*checkpoint->validate(1, {0, 8}), "unknown_expert_tensor"), nullptr);
    EXPECT_OK(checkpoint->expert(0, 3));
    const auto accepted = must(
        Checkpoint::open(checkpoint.dir.path().string(), {.accept_tensors = {"*nothing*", name}}));
    EXPECT_OK(accepted->expert(1, 3));
    EXPECT_EQ(find(accepted->findings(), "unknown_expert_tensor"), nullptr);
    const Finding* listed = find(accepted->findings(), "accepted_tensor");
    ASSERT_NE(listed, nullptr);
    EXPECT_EQ(listed->severity, Severity::kWarning);
    EXPECT_EQ(listed->tensor, name);
  }
}

TEST(OtherTensors, AcceptedOnesAreCountedAndLeaveTheExpertsAsTheyAre) {
  std::vector<std::string> names;
  for (int e = 0; e < 8; ++e) names.push_back(kLayer + std::to_string(e) + ".up_proj.output_scale");
  CheckpointBuilder builder = builder_with("qwen3_moe", names);
  const Opened accepted(builder, {.accept_tensors = {"*.output_scale"}});
  const Finding* listed = find(accepted->findings(), "accepted_tensor");
  ASSERT_NE(listed, nullptr);
  EXPECT_EQ(listed->count, 8);
  EXPECT_EQ(listed->examples.size(), Finding::kMaxExamples);
  expect_same(accepted->expert(1, 5), builder, 1, 5);
}

TEST(OtherTensors, HarmlessOnesAreANote) {
  for (const char* part : {"k_scale", "v_scale", "weight_shape", "input_global_scale"}) {
    const Opened checkpoint(builder_with("qwen3_moe", {kExpert + "up_proj." + part}));
    EXPECT_OK(checkpoint->expert(1, 3));
    const Finding* finding = find(checkpoint->findings(), "harmless_expert_tensor");
    ASSERT_NE(finding, nullptr) << part;
    EXPECT_EQ(finding->severity, Severity::kNote);
  }
}

// Rows of all experts in one matrix, as some exporters write them.
TEST(OtherTensors, WeightsUnderAnotherNameAreNamedAsSuch) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .layers = 1});
  std::erase_if(builder.tensors(),
                [](const auto& one) { return one.first.find(".experts.") != std::string::npos; });
  const std::string stem = "model.layers.0.mlp.experts.gate_up_proj.";
  for (const char* part : {"weight", "weight_scale", "weight_scale_2"})
    builder.tensors()[stem + part] = {DType::kU8, {8, 2}, std::vector<uint8_t>(16)};
  EXPECT_THAT(refusal_of_open(builder),
              Refused(Code::kUnsupported, stem + "weight: weights under a name that"));
}

// Only the experts' modules are read.
TEST(OtherTensors, OtherModulesMayHoldAnything) {
  const Opened checkpoint(builder_with(
      "qwen3_moe",
      {"model.layers.1.self_attn.k_proj.k_scale", "model.layers.1.self_attn.q_proj.lora_A.weight",
       "model.layers.1.mlp.gate.rotation", "model.layers.1.mlp.e_score_correction_bias",
       "model.layers.1.mlp.experts.e_score_correction_bias",
       "model.layers.7.mlp.experts.0.up_proj.lora_A",
       "mtp.layers.0.mlp.experts.0.up_proj.rotation"}));
  EXPECT_EQ(find(checkpoint->findings(), "unknown_expert_tensor"), nullptr);
  EXPECT_OK(checkpoint->expert(1, 0));
}

TEST(OtherTensors, OfASharedExpertThatIsLoadedRefuseTheLayer) {
  for (const char* part : {"up_proj.output_scale", "lora_A", "down_proj.lora_B.weight"}) {
    const std::string name = std::string("model.layers.1.mlp.shared_expert.") + part;
    const Opened checkpoint(builder_with("qwen2_moe", {name}));
    EXPECT_THAT(checkpoint->expert(1, 0).status().message(), HasSubstr(name));
    EXPECT_OK(checkpoint->expert(0, 0));
    const auto accepted =
        must(Checkpoint::open(checkpoint.dir.path().string(), {.accept_tensors = {name}}));
    EXPECT_OK(accepted->shared_expert(1));
  }
}

// Left to the host, like a shared expert in floats: the routed experts are plain NVFP4.
TEST(OtherTensors, ASharedExpertOfAwqOrSvdquantIsNotLoaded) {
  for (const std::string part : {"pre_quant_scale", "input_quantizer._pre_quant_scale",
                                 "weight_quantizer._svdquant_lora_a"}) {
    const Opened checkpoint(
        builder_with("qwen2_moe", {"model.layers.0.mlp.shared_expert.up_proj." + part,
                                   "model.layers.1.mlp.shared_expert.up_proj." + part}));
    EXPECT_OK(checkpoint->expert(1, 3));
    EXPECT_EQ(checkpoint->layer_options(1)->shared_intermediate_size, 0);
    EXPECT_EQ(checkpoint->shared_expert(1).status().code(), Code::kUnsupported);
    const Finding* finding = find(checkpoint->findings(), "shared_expert_not_loaded");
    ASSERT_NE(finding, nullptr);
    EXPECT_THAT(finding->actual, HasSubstr(part));
  }
}

TEST(OtherTensors, PatternsMatchWholeNames) {
  EXPECT_TRUE(matches_pattern("a.b", "a.b"));
  EXPECT_FALSE(matches_pattern("a.b", "a.bc"));
  EXPECT_FALSE(matches_pattern("a", ""));
  EXPECT_TRUE(matches_pattern("*", ""));
  EXPECT_FALSE(matches_pattern("*.lora_?", "x.lora_A"));
  EXPECT_TRUE(
      matches_pattern("model.*.up_proj.*", "model.layers.0.mlp.experts.1.up_proj.rotation"));
  EXPECT_TRUE(matches_pattern("*a*b*", "xxaabb"));
  EXPECT_FALSE(matches_pattern("*a*b", "ab-"));
  EXPECT_TRUE(matches_pattern("***", "x"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::other_tensors_test
