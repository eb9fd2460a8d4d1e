// Tensors in an experts' module that belong to no format: the layer is refused by name unless they
// are harmless or accepted.
#include "checkpoint/other_tensors.h"

#include "checkpoint/experts.h"

namespace nvfp4_moe::internal::test::other_tensors_test {
namespace {

// A checkpoint with two layers, and additional tensors.
Result<Checkpoint> open_with(const BuilderOptions& options, const std::vector<std::string>& names,
                             const CheckpointOptions& reading, const TempDir& dir) {
  CheckpointBuilder builder(options);
  for (const std::string& name : names)
    builder.tensors()[name] = {DType::kF32, {2}, std::vector<uint8_t>(8)};
  NVFP4_MOE_TRY(builder.write(dir.path().string()));
  return Checkpoint::open(dir.path().string(), reading);
}

const BuilderOptions kQwen{.model_type = "qwen3_moe"};
const std::string kExpert = "model.layers.1.mlp.experts.3.";

TEST(OtherTensors, OneThatMayChangeTheResultRefusesTheLayerByName) {
  for (const std::string& name :
       {kExpert + "up_proj.lora_A.weight", kExpert + "up_proj.lora_B.default.weight",
        kExpert + "down_proj.smoothing_factor", kExpert + "gate_proj.input_channel_scale",
        kExpert + "down_proj.act_scale", kExpert + "up_proj.rotation",
        kExpert + "up_proj.weight_offset", kExpert + "down_proj.output_scale",
        kExpert + "up_proj.weight_zero_point", kExpert + "up_proj.input_quantizer._pre_quant_scale",
        kExpert + "up_proj.weight_quantizer._svdquant_lora_a", kExpert + "rotation",
        std::string("model.layers.1.mlp.experts.lora_A"),
        std::string("model.layers.1.mlp.experts.gate_up_proj_lora_A"),
        std::string("base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_A.weight"),
        kExpert + "up_proj.weight_global_scale"}) {
    SCOPED_TRACE(name);
    TempDir dir;
    const auto checkpoint = must(open_with(kQwen, {name}, {}, dir));
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

    const auto accepted =
        must(Checkpoint::open(dir.path().string(), {.accept_tensors = {"*nothing*", name}}));
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
  for (int e = 0; e < 8; ++e)
    names.push_back("model.layers.0.mlp.experts." + std::to_string(e) + ".up_proj.output_scale");
  TempDir dir, plain_dir;
  const auto plain = must(open_with(kQwen, {}, {}, plain_dir));
  const auto accepted = must(open_with(kQwen, names, {.accept_tensors = {"*.output_scale"}}, dir));
  const Finding* listed = find(accepted->findings(), "accepted_tensor");
  ASSERT_NE(listed, nullptr);
  EXPECT_EQ(listed->count, 8);
  EXPECT_EQ(listed->examples.size(), Finding::kMaxExamples);
  expect_same(accepted->expert(0, 5), plain->expert(0, 5));
}

TEST(OtherTensors, HarmlessOnesAreANote) {
  for (const char* part : {"k_scale", "v_scale", "weight_shape", "input_global_scale"}) {
    TempDir dir;
    const auto checkpoint = must(open_with(kQwen, {kExpert + "up_proj." + part}, {}, dir));
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
  for (const char* part : {"weight", "weight_scale", "weight_scale_2"})
    builder.tensors()[std::string("model.layers.0.mlp.experts.gate_up_proj.") + part] = {
        DType::kU8, {8, 2}, {}};
  for (auto& [name, tensor] : builder.tensors())
    if (tensor.bytes.empty()) tensor.bytes.resize(16);
  EXPECT_THAT(refusal_of_open(builder),
              Refused(Code::kUnsupported,
                      "model.layers.0.mlp.experts.gate_up_proj.weight: weights under a name that"));
}

// Only the experts' modules are read.
TEST(OtherTensors, OtherModulesMayHoldAnything) {
  TempDir dir;
  const Result<Checkpoint> checkpoint = open_with(
      kQwen,
      {"model.layers.1.self_attn.k_proj.k_scale", "model.layers.1.self_attn.q_proj.lora_A.weight",
       "model.layers.1.mlp.gate.rotation", "model.layers.1.mlp.e_score_correction_bias",
       "model.layers.1.mlp.experts.e_score_correction_bias",
       "model.layers.7.mlp.experts.0.up_proj.lora_A",
       "mtp.layers.0.mlp.experts.0.up_proj.rotation"},
      {}, dir);
  ASSERT_OK(checkpoint);
  EXPECT_EQ(find(checkpoint->findings(), "unknown_expert_tensor"), nullptr);
  EXPECT_OK(checkpoint->expert(1, 0));
}

TEST(OtherTensors, OfASharedExpertThatIsLoadedRefuseTheLayer) {
  const BuilderOptions options{.model_type = "qwen2_moe"};
  const std::string stem = "model.layers.1.mlp.shared_expert.";
  for (const std::string& name :
       {stem + "up_proj.output_scale", stem + "lora_A", stem + "down_proj.lora_B.weight"}) {
    SCOPED_TRACE(name);
    TempDir dir;
    const auto checkpoint = must(open_with(options, {name}, {}, dir));
    EXPECT_THAT(checkpoint->expert(1, 0).status().message(), HasSubstr(name));
    EXPECT_OK(checkpoint->expert(0, 0));
    const auto accepted = must(Checkpoint::open(dir.path().string(), {.accept_tensors = {name}}));
    EXPECT_OK(accepted->shared_expert(1));
  }
}

// Left to the host, like a shared expert in floats: the routed experts are plain NVFP4.
TEST(OtherTensors, ASharedExpertOfAwqOrSvdquantIsNotLoaded) {
  const BuilderOptions options{.model_type = "qwen2_moe"};
  for (const char* part : {"pre_quant_scale", "input_quantizer._pre_quant_scale",
                           "weight_quantizer._svdquant_lora_a"}) {
    SCOPED_TRACE(part);
    std::vector<std::string> names;
    for (const char* layer : {"0", "1"})
      names.push_back("model.layers." + std::string(layer) + ".mlp.shared_expert.up_proj." + part);
    TempDir dir;
    const auto checkpoint = must(open_with(options, names, {}, dir));
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
  EXPECT_TRUE(matches_pattern("*.lora_?", "x.lora_?"));
  EXPECT_FALSE(matches_pattern("*.lora_?", "x.lora_A"));
  EXPECT_TRUE(
      matches_pattern("model.*.up_proj.*", "model.layers.0.mlp.experts.1.up_proj.rotation"));
  EXPECT_TRUE(matches_pattern("*a*b*", "xxaabb"));
  EXPECT_FALSE(matches_pattern("*a*b", "ab-"));
  EXPECT_TRUE(matches_pattern("***", "x"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::other_tensors_test
