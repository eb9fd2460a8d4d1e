// The order of gate's and up's rows in a tensor comes from the family and the name, or from the
// caller. It is never guessed.
#include "checkpoint/experts.h"
#include "nvfp4_moe/nvfp4_moe.hpp"

namespace nvfp4_moe::internal::test::gate_up_order_test {
namespace {

// Opens the stacked copy of a checkpoint and compares its experts with the original's.
void expect_same_experts(const BuilderOptions& options, GateUpOrder order,
                         const CheckpointOptions& reading) {
  CheckpointBuilder plain(options), stacked(options);
  stack_experts(stacked, order);
  const Opened theirs(plain), ours(stacked, reading);
  const int64_t layer = plain.layers().back();
  EXPECT_OK(ours->check_layout(layer, {0, options.num_experts}));
  for (int64_t e = 0; e < options.num_experts; ++e) {
    for (const IntermediateSlice slice : {IntermediateSlice{}, {16, 16}}) {
      expect_same(ours->expert(layer, e, slice), theirs->expert(layer, e, slice));
    }
  }
  EXPECT_EQ(ours->layer_scales(layer)->hidden, theirs->layer_scales(layer)->hidden);
}

// The names of inference engines' parameters, as ModelOpt exports them for some models.
TEST(GateUpOrder, W13IsGateFirstInFamiliesOfSilu) {
  for (const char* type :
       {"qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3", "deepseek_v4", "minimax_m2"}) {
    for (const SourceFormat format :
         {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors, SourceFormat::kFloat}) {
      SCOPED_TRACE(std::string(type) + " " + to_string(format));
      if (std::string(type) == "deepseek_v4" && format == SourceFormat::kCompressedTensors)
        continue;
      expect_same_experts({.model_type = type, .format = format}, GateUpOrder::kGateFirst, {});
    }
  }
}

TEST(GateUpOrder, TheCallerDecides) {
  for (const SourceFormat format :
       {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors, SourceFormat::kFloat}) {
    for (const GateUpOrder order :
         {GateUpOrder::kGateFirst, GateUpOrder::kUpFirst, GateUpOrder::kInterleaved}) {
      SCOPED_TRACE(std::string(to_string(format)) + " " + to_string(order));
      expect_same_experts({.model_type = "glm4_moe", .format = format}, order,
                          {.gate_up_order = order});
    }
  }
}

TEST(GateUpOrder, AnOrderThatContradictsTheFamilyIsReported) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  stack_experts(builder, GateUpOrder::kUpFirst);
  const Opened given(builder, {.gate_up_order = GateUpOrder::kUpFirst});
  const Finding* finding = find(given->findings(), "gate_up_order");
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->severity, Severity::kWarning);
  EXPECT_THAT(to_string(*finding), HasSubstr("rows gate_first, as qwen has them, got up_first"));
  const auto same =
      must(Checkpoint::open(given.dir.path().string(), {.gate_up_order = GateUpOrder::kGateFirst}));
  EXPECT_EQ(find(same->findings(), "gate_up_order"), nullptr);
}

// Under one name, engines store the rows for this activation in either order.
TEST(GateUpOrder, AnUnknownOrderIsRefusedAndSaysWhichOptionDecides) {
  const BuilderOptions options{.model_type = "minimax_m3", .format = SourceFormat::kFloat};
  CheckpointBuilder builder(options);
  stack_experts(builder, GateUpOrder::kInterleaved);
  const Opened unknown(builder);
  const int64_t layer = builder.layers().front();
  const Status refused = unknown->expert(layer, 0).status();
  EXPECT_EQ(refused.code(), Code::kUnsupported);
  EXPECT_EQ(refused.finding(), "gate_up_order_unknown");
  EXPECT_THAT(
      refused.message(),
      HasSubstr("set gate_up_order (--gate-up-order) to gate_first, up_first, interleaved"));
  EXPECT_EQ(unknown->check_layout(layer, {0, 8}).finding(), "gate_up_order_unknown");
  EXPECT_NE(find(*unknown->validate(layer, {0, 8}), "gate_up_order_unknown"), nullptr);
  expect_same_experts(options, GateUpOrder::kInterleaved,
                      {.gate_up_order = GateUpOrder::kInterleaved});
}

// A name with its own order, as in TensorRT-LLM, is not read as another one.
TEST(GateUpOrder, OtherNamesOfBothAreRefusedByName) {
  for (const char* word : {"w31_", "w3_w1_"}) {
    CheckpointBuilder builder({.model_type = "qwen3_moe", .layers = 1});
    stack_experts(builder, GateUpOrder::kUpFirst);
    auto& tensors = builder.tensors();
    const std::string stem = "model.layers.0.mlp.experts.";
    for (const char* part : {"weight", "weight_scale", "weight_scale_2", "input_scale"}) {
      auto node = tensors.extract(stem + "w13_" + part);
      node.key() = stem + word + part;
      tensors.insert(std::move(node));
    }
    const Opened checkpoint(builder);
    EXPECT_THAT(checkpoint->expert(0, 0).status().message(), HasSubstr(stem + word));
  }
}

// A shared expert in one tensor: `shared_experts.w13.weight`.
TEST(GateUpOrder, HoldsForASharedExpert) {
  for (const GateUpOrder order :
       {GateUpOrder::kGateFirst, GateUpOrder::kUpFirst, GateUpOrder::kInterleaved}) {
    CheckpointBuilder builder({.model_type = "deepseek_v3", .format = SourceFormat::kFloat});
    CheckpointBuilder plain = builder;
    for (const int64_t layer : builder.layers()) {
      RawTensor both = take(builder, builder.tensor_name(layer, -1, "gate", "codes"));
      const RawTensor up = take(builder, builder.tensor_name(layer, -1, "up", "codes"));
      const std::string down = builder.tensor_name(layer, -1, "down", "codes");
      const std::string stem = down.substr(0, down.find("down_proj"));
      both.bytes = joined(both.bytes, up.bytes,
                          both.bytes.size() / static_cast<size_t>(both.shape[0]), order);
      both.shape[0] *= 2;
      builder.tensors()[stem + "w13.weight"] = both;
      builder.tensors()[stem + "w2.weight"] = take(builder, down);
    }
    const Opened ours(builder, {.gate_up_order = order}), theirs(plain);
    const int64_t layer = builder.layers().front();
    expect_same(ours->shared_expert(layer), theirs->shared_expert(layer));
  }
}

TEST(GateUpOrder, IsGivenThroughTheCInterface) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  stack_experts(builder, GateUpOrder::kUpFirst);
  builder.tensors()["model.layers.0.mlp.experts.output_scale"] = {
      DType::kF32, {1}, std::vector<uint8_t>(4)};
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const std::string path = dir.path().string();
  auto options = nvfp4_moe::make<nvfp4_moe_checkpoint_options>();
  nvfp4_moe_checkpoint* checkpoint = nullptr;
  options.gate_up_order = "sideways";
  EXPECT_EQ(nvfp4_moe_checkpoint_open_with(path.c_str(), &options, &checkpoint),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(nvfp4_moe_last_error(),
              HasSubstr("gate_up_order: expected one of gate_first, up_first, interleaved"));
  options.gate_up_order = "up_first";
  options.accept_count = 1;
  EXPECT_EQ(nvfp4_moe_checkpoint_open_with(path.c_str(), &options, &checkpoint),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  const char* const accepted[] = {"*.output_scale"};
  options.accept_tensors = accepted;
  ASSERT_EQ(nvfp4_moe_checkpoint_open_with(path.c_str(), &options, &checkpoint),
            NVFP4_MOE_STATUS_OK);
  char* text = nullptr;
  ASSERT_EQ(nvfp4_moe_checkpoint_findings(checkpoint, -1, &text), NVFP4_MOE_STATUS_OK);
  EXPECT_THAT(std::string(text), HasSubstr("accepted_tensor"));
  EXPECT_THAT(std::string(text), HasSubstr("up_first, as gate_up_order says"));
  nvfp4_moe_text_free(text);
  nvfp4_moe_checkpoint_close(checkpoint);
  EXPECT_EQ(nvfp4_moe_checkpoint_open_with(path.c_str(), nullptr, &checkpoint),
            NVFP4_MOE_STATUS_OK);
  nvfp4_moe_checkpoint_close(checkpoint);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::gate_up_order_test
