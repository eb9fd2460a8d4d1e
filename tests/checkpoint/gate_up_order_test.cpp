// The order of gate's and up's rows in a tensor comes from the family and the name, or from the
// caller. It is never guessed.
#include "checkpoint/experts.h"
#include "nvfp4_moe/nvfp4_moe.hpp"

namespace nvfp4_moe::internal::test::gate_up_order_test {
namespace {

constexpr GateUpOrder kOrders[] = {GateUpOrder::kGateFirst, GateUpOrder::kUpFirst,
                                   GateUpOrder::kInterleaved};

// Opens the stacked copy of a checkpoint and compares its experts with the original's.
void expect_same_experts(const BuilderOptions& options, GateUpOrder order,
                         const CheckpointOptions& reading) {
  SCOPED_TRACE(options.model_type + " " + to_string(options.format) + " " + to_string(order));
  CheckpointBuilder plain(options);
  const int64_t layer = plain.layers().back();
  for (int64_t e = 0; e < options.num_experts; ++e)
    plain.matrix(layer, e, "up").tensor_scale *= 1.5f;  // another one than gate's
  CheckpointBuilder stacked = plain;
  stack_experts(stacked, order);
  const Opened theirs(plain), ours(stacked, reading);
  EXPECT_OK(ours->check_layout(layer, {0, options.num_experts}));
  for (int64_t e = 0; e < options.num_experts; ++e)
    for (const IntermediateSlice slice : {IntermediateSlice{}, {16, 16}})
      expect_same(ours->expert(layer, e, slice), theirs->expert(layer, e, slice));
  EXPECT_EQ(ours->layer_scales(layer)->hidden, theirs->layer_scales(layer)->hidden);
}

// The names of inference engines' parameters, as ModelOpt exports them for some models.
TEST(GateUpOrder, IsTheFamilysOrTheCallers) {
  for (const char* type :
       {"qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3", "deepseek_v4", "minimax_m2"})
    expect_same_experts({.model_type = type}, GateUpOrder::kGateFirst, {});
  for (const SourceFormat format :
       {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors, SourceFormat::kFloat})
    for (const GateUpOrder order : kOrders)
      expect_same_experts({.model_type = "glm4_moe", .format = format}, order,
                          {.gate_up_order = order});
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
TEST(GateUpOrder, AnUnknownOrderIsRefusedWithTheOptionThatDecides) {
  const BuilderOptions options{.model_type = "minimax_m3", .format = SourceFormat::kFloat};
  CheckpointBuilder builder(options);
  stack_experts(builder, GateUpOrder::kInterleaved);
  const Opened unknown(builder);
  const int64_t layer = builder.layers().front();
  const Status refused = unknown->expert(layer, 0).status();
  EXPECT_EQ(refused.finding(), "gate_up_order_unknown");
  EXPECT_THAT(refused,
              Refused(Code::kUnsupported,
                      "set gate_up_order (--gate-up-order) to gate_first, up_first, interleaved"));
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
    const std::string stem = "model.layers.0.mlp.experts.";
    for (const char* part : {"weight", "weight_scale", "weight_scale_2", "input_scale"}) {
      auto node = builder.tensors().extract(stem + "w13_" + part);
      node.key() = stem + word + part;
      builder.tensors().insert(std::move(node));
    }
    const Opened checkpoint(builder);
    EXPECT_THAT(checkpoint->expert(0, 0).status().message(), HasSubstr(stem + word));
  }
}

// A shared expert in one tensor, named by engines or as in transformers; its matrices share a
// tensor scale.
TEST(GateUpOrder, HoldsForASharedExpert) {
  const auto check = [](SourceFormat format, const char* word, const char* down_word,
                        std::optional<GateUpOrder> order) {
    SCOPED_TRACE(testing::Message() << word << " " << to_string(format));
    CheckpointBuilder plain({.model_type = "deepseek_v3", .format = format});
    for (const int64_t layer : plain.layers())
      plain.matrix(layer, -1, "up").tensor_scale = plain.matrix(layer, -1, "gate").tensor_scale;
    CheckpointBuilder builder = plain;
    auto& tensors = builder.tensors();
    for (const int64_t layer : builder.layers()) {
      for (const char* part : {"codes", "scales", "tensor_scale", "input_scale"}) {
        const std::string down = builder.tensor_name(layer, -1, "down", part);
        const std::string stem = down.substr(0, down.find("down_proj"));
        const std::string suffix = down.substr(down.rfind('.'));
        auto gate = tensors.extract(builder.tensor_name(layer, -1, "gate", part));
        const auto up = tensors.extract(builder.tensor_name(layer, -1, "up", part));
        if (gate.empty()) continue;
        auto below = tensors.extract(down);
        RawTensor both = gate.mapped();
        if (both.shape.size() == 2) {
          both.bytes = joined(both.bytes, up.mapped().bytes,
                              both.bytes.size() / static_cast<size_t>(both.shape[0]),
                              order.value_or(GateUpOrder::kGateFirst));
          both.shape[0] *= 2;
        }
        tensors[stem + word + suffix] = both;
        tensors[stem + down_word + suffix] = below.mapped();
      }
    }
    CheckpointOptions reading;
    reading.gate_up_order = order;
    const Opened ours(builder, reading), theirs(plain);
    const int64_t layer = builder.layers().front();
    EXPECT_EQ(find(ours->findings(), "shared_expert_not_loaded"), nullptr);
    EXPECT_EQ(ours->layer_options(layer)->shared_intermediate_size, 32);
    EXPECT_OK(ours->check_layout(layer, {0, 8}));
    for (const IntermediateSlice slice : {IntermediateSlice{}, {16, 16}})
      expect_same(ours->shared_expert(layer, slice), theirs->shared_expert(layer, slice));
  };
  for (const GateUpOrder order : kOrders) check(SourceFormat::kFloat, "w13", "w2", order);
  check(SourceFormat::kFloat, "gate_up_proj", "down_proj", {});
  check(SourceFormat::kModelOpt, "gate_up_proj", "down_proj", {});
}

TEST(GateUpOrder, IsGivenThroughTheCInterface) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  stack_experts(builder, GateUpOrder::kUpFirst);
  builder.tensors()["model.layers.0.mlp.experts.output_scale"] = {
      DType::kF32, {1}, std::vector<uint8_t>(4)};
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  auto options = nvfp4_moe::make<nvfp4_moe_checkpoint_options>();
  nvfp4_moe_checkpoint* checkpoint = nullptr;
  const auto open = [&](const char* order, const char* const* accepted) {
    options.gate_up_order = order;
    options.accept_tensors = accepted;
    return nvfp4_moe_checkpoint_open_with(dir.path().c_str(), &options, &checkpoint);
  };
  EXPECT_EQ(open("sideways", nullptr), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(nvfp4_moe_last_error(),
              HasSubstr("gate_up_order: expected one of gate_first, up_first, interleaved"));
  options.accept_count = 1;
  EXPECT_EQ(open("up_first", nullptr), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  const char* const accepted[] = {"*.output_scale"};
  ASSERT_EQ(open("up_first", accepted), NVFP4_MOE_STATUS_OK);
  char* text = nullptr;
  ASSERT_EQ(nvfp4_moe_checkpoint_findings(checkpoint, -1, &text), NVFP4_MOE_STATUS_OK);
  EXPECT_THAT(text,
              AllOf(HasSubstr("accepted_tensor"), HasSubstr("up_first, as gate_up_order says")));
  nvfp4_moe_text_free(text);
  nvfp4_moe_checkpoint_close(checkpoint);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::gate_up_order_test
