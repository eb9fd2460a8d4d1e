// Tensors that hold gate and up: which rows are whose comes from the family and the name, or from the caller, and is never
// guessed. Each stack is written from a checkpoint with one tensor an expert; both must load as the same bytes.
#include <cstring>

#include "checkpoint/checkpoint.h"
#include "nvfp4_moe/nvfp4_moe.hpp"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::gate_up_order_test {
namespace {

using test::BuilderOptions;
using test::CheckpointBuilder;
using test::RawTensor;
using test::TempDir;
using testing::HasSubstr;

using Bytes = std::vector<uint8_t>;

// Rows of gate and up of one expert in one tensor.
Bytes joined(const Bytes& gate, const Bytes& up, size_t row_bytes, GateUpOrder order) {
  const Bytes& first = order == GateUpOrder::kUpFirst ? up : gate;
  const Bytes& second = order == GateUpOrder::kUpFirst ? gate : up;
  const size_t step = order == GateUpOrder::kInterleaved ? row_bytes : first.size();
  Bytes out;
  for (size_t at = 0; at < first.size(); at += step) {
    out.insert(out.end(), first.begin() + static_cast<int64_t>(at), first.begin() + static_cast<int64_t>(at + step));
    out.insert(out.end(), second.begin() + static_cast<int64_t>(at), second.begin() + static_cast<int64_t>(at + step));
  }
  return out;
}

// Takes the tensor out of the builder.
RawTensor take(CheckpointBuilder& builder, const std::string& name) {
  auto node = builder.tensors().extract(name);
  EXPECT_FALSE(node.empty()) << name;
  return node.empty() ? RawTensor() : node.mapped();
}

bool is_scalar(const RawTensor& tensor) { return tensor.shape.size() < 2; }

// All experts of a layer as `<stem>.w13_<part>` and `<stem>.w2_<part>`. gate and up keep a tensor scale each.
void stack_experts(CheckpointBuilder& builder, int64_t layer, GateUpOrder order) {
  const int64_t experts = builder.options().num_experts;
  for (const char* part : {"codes", "scales", "tensor_scale", "input_scale"}) {
    const std::string name = builder.tensor_name(layer, 0, "gate", part);
    if (builder.tensors().find(name) == builder.tensors().end()) continue;
    const std::string stem = name.substr(0, name.find(".experts.") + 9);
    RawTensor both, down;
    for (int64_t e = 0; e < experts; ++e) {
      const RawTensor gate = take(builder, builder.tensor_name(layer, e, "gate", part));
      const RawTensor up = take(builder, builder.tensor_name(layer, e, "up", part));
      const RawTensor below = take(builder, builder.tensor_name(layer, e, "down", part));
      const size_t row = is_scalar(gate) ? 4 : gate.bytes.size() / static_cast<size_t>(gate.shape[0]);
      const Bytes rows = joined(gate.bytes, up.bytes, row, order);
      both.bytes.insert(both.bytes.end(), rows.begin(), rows.end());
      down.bytes.insert(down.bytes.end(), below.bytes.begin(), below.bytes.end());
      both.dtype = down.dtype = gate.dtype;
      both.shape = is_scalar(gate) ? std::vector<int64_t>{experts, 2}
                                   : std::vector<int64_t>{experts, 2 * gate.shape[0], gate.shape[1]};
      down.shape = is_scalar(gate) ? std::vector<int64_t>{experts}
                                   : std::vector<int64_t>{experts, below.shape[0], below.shape[1]};
    }
    const std::string suffix = name.substr(name.rfind('.') + 1);
    builder.tensors()[stem + "w13_" + suffix] = both;
    builder.tensors()[stem + "w2_" + suffix] = down;
  }
}

void expect_same(const Nvfp4View& ours, const Nvfp4View& theirs) {
  ASSERT_EQ(ours.rows, theirs.rows);
  ASSERT_EQ(ours.cols, theirs.cols);
  EXPECT_EQ(ours.tensor_scale, theirs.tensor_scale);
  for (int64_t r = 0; r < ours.rows; ++r) {
    ASSERT_EQ(std::memcmp(ours.row_codes(r), theirs.row_codes(r), static_cast<size_t>(ours.cols / 2)), 0) << r;
    ASSERT_EQ(std::memcmp(ours.row_scales(r), theirs.row_scales(r), static_cast<size_t>(ours.cols / 16)), 0) << r;
  }
}

// Opens the stacked copy of a checkpoint and compares its experts with the original's.
void expect_same_experts(const BuilderOptions& options, GateUpOrder order, const CheckpointOptions& reading) {
  CheckpointBuilder plain(options), stacked(options);
  for (const int64_t layer : stacked.layers()) stack_experts(stacked, layer, order);
  TempDir dir;
  ASSERT_OK(plain.write(dir.file("plain")));
  ASSERT_OK(stacked.write(dir.file("stacked")));
  const Result<Checkpoint> theirs = Checkpoint::open(dir.file("plain"));
  const Result<Checkpoint> ours = Checkpoint::open(dir.file("stacked"), reading);
  ASSERT_OK(theirs);
  ASSERT_OK(ours);
  const int64_t layer = plain.layers().back();
  EXPECT_OK(ours->check_layout(layer, {0, options.num_experts}));
  for (int64_t e = 0; e < options.num_experts; ++e) {
    for (const IntermediateSlice slice : {IntermediateSlice{}, {16, 16}}) {
      const Result<LoadedExpert> our = ours->expert(layer, e, slice), their = theirs->expert(layer, e, slice);
      ASSERT_OK(our);
      ASSERT_OK(their);
      expect_same(our->source.gate, their->source.gate);
      expect_same(our->source.up, their->source.up);
      expect_same(our->source.down, their->source.down);
    }
  }
  EXPECT_EQ(ours->layer_scales(layer)->hidden, theirs->layer_scales(layer)->hidden);
}

const Finding* find(const std::vector<Finding>& findings, const std::string& id) {
  for (const Finding& finding : findings)
    if (finding.id == id) return &finding;
  return nullptr;
}

// The names of inference engines' parameters, as ModelOpt exports them for some models.
TEST(GateUpOrder, W13IsGateFirstInFamiliesOfSilu) {
  for (const char* type : {"qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3", "deepseek_v4", "minimax_m2"}) {
    for (const SourceFormat format :
         {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors, SourceFormat::kFloat}) {
      SCOPED_TRACE(std::string(type) + " " + to_string(format));
      if (std::string(type) == "deepseek_v4" && format == SourceFormat::kCompressedTensors) continue;
      expect_same_experts({.model_type = type, .format = format}, GateUpOrder::kGateFirst, {});
    }
  }
}

TEST(GateUpOrder, TheCallerDecides) {
  for (const SourceFormat format : {SourceFormat::kModelOpt, SourceFormat::kCompressedTensors, SourceFormat::kFloat}) {
    for (const GateUpOrder order : {GateUpOrder::kGateFirst, GateUpOrder::kUpFirst, GateUpOrder::kInterleaved}) {
      SCOPED_TRACE(std::string(to_string(format)) + " " + to_string(order));
      expect_same_experts({.model_type = "glm4_moe", .format = format}, order, {.gate_up_order = order});
    }
  }
}

TEST(GateUpOrder, AnOrderThatContradictsTheFamilyIsReported) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (const int64_t layer : builder.layers()) stack_experts(builder, layer, GateUpOrder::kUpFirst);
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const Result<Checkpoint> given = Checkpoint::open(dir.path().string(), {.gate_up_order = GateUpOrder::kUpFirst});
  ASSERT_OK(given);
  const Finding* finding = find(given->findings(), "gate_up_order");
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->severity, Severity::kWarning);
  EXPECT_THAT(to_string(*finding), HasSubstr("rows gate_first, as qwen has them, got up_first"));
  const Result<Checkpoint> same = Checkpoint::open(dir.path().string(), {.gate_up_order = GateUpOrder::kGateFirst});
  ASSERT_OK(same);
  EXPECT_EQ(find(same->findings(), "gate_up_order"), nullptr);
}

// Engines keep the rows of this activation in either order under one name.
TEST(GateUpOrder, AnUnknownOrderIsRefusedAndSaysWhichOptionDecides) {
  const BuilderOptions options{.model_type = "minimax_m3", .format = SourceFormat::kFloat};
  CheckpointBuilder builder(options);
  for (const int64_t layer : builder.layers()) stack_experts(builder, layer, GateUpOrder::kInterleaved);
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const Result<Checkpoint> unknown = Checkpoint::open(dir.path().string());
  ASSERT_OK(unknown);
  const int64_t layer = builder.layers().front();
  const Status refused = unknown->expert(layer, 0).status();
  EXPECT_EQ(refused.code(), Code::kUnsupported);
  EXPECT_EQ(refused.finding(), "gate_up_order_unknown");
  EXPECT_THAT(refused.message(), HasSubstr("set gate_up_order (--gate-up-order) to gate_first, up_first, interleaved"));
  EXPECT_EQ(unknown->check_layout(layer, {0, 8}).finding(), "gate_up_order_unknown");
  EXPECT_NE(find(*unknown->validate(layer, {0, 8}), "gate_up_order_unknown"), nullptr);
  expect_same_experts(options, GateUpOrder::kInterleaved, {.gate_up_order = GateUpOrder::kInterleaved});
}

// A name with an order of its own, as TensorRT-LLM has it, is not read as another one.
TEST(GateUpOrder, OtherNamesOfBothAreRefusedByName) {
  for (const char* word : {"w31_", "w3_w1_"}) {
    CheckpointBuilder builder({.model_type = "qwen3_moe", .layers = 1});
    stack_experts(builder, 0, GateUpOrder::kUpFirst);
    auto& tensors = builder.tensors();
    const std::string stem = "model.layers.0.mlp.experts.";
    for (const char* part : {"weight", "weight_scale", "weight_scale_2", "input_scale"}) {
      auto node = tensors.extract(stem + "w13_" + part);
      node.key() = stem + word + part;
      tensors.insert(std::move(node));
    }
    TempDir dir;
    ASSERT_OK(builder.write(dir.path().string()));
    const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
    ASSERT_OK(checkpoint);
    EXPECT_THAT(checkpoint->expert(0, 0).status().message(), HasSubstr(stem + word));
  }
}

// A shared expert in one tensor: `shared_experts.w13.weight`.
TEST(GateUpOrder, HoldsForASharedExpert) {
  for (const GateUpOrder order : {GateUpOrder::kGateFirst, GateUpOrder::kUpFirst, GateUpOrder::kInterleaved}) {
    CheckpointBuilder builder({.model_type = "deepseek_v3", .format = SourceFormat::kFloat});
    CheckpointBuilder plain = builder;
    for (const int64_t layer : builder.layers()) {
      RawTensor both = take(builder, builder.tensor_name(layer, -1, "gate", "codes"));
      const RawTensor up = take(builder, builder.tensor_name(layer, -1, "up", "codes"));
      const std::string down = builder.tensor_name(layer, -1, "down", "codes");
      const std::string stem = down.substr(0, down.find("down_proj"));
      both.bytes = joined(both.bytes, up.bytes, both.bytes.size() / static_cast<size_t>(both.shape[0]), order);
      both.shape[0] *= 2;
      builder.tensors()[stem + "w13.weight"] = both;
      builder.tensors()[stem + "w2.weight"] = take(builder, down);
    }
    TempDir dir;
    ASSERT_OK(builder.write(dir.file("fused")));
    ASSERT_OK(plain.write(dir.file("plain")));
    const Result<Checkpoint> ours = Checkpoint::open(dir.file("fused"), {.gate_up_order = order});
    const Result<Checkpoint> theirs = Checkpoint::open(dir.file("plain"));
    ASSERT_OK(ours);
    ASSERT_OK(theirs);
    const int64_t layer = builder.layers().front();
    const Result<LoadedExpert> our = ours->shared_expert(layer), their = theirs->shared_expert(layer);
    ASSERT_OK(our);
    ASSERT_OK(their);
    expect_same(our->source.gate, their->source.gate);
    expect_same(our->source.up, their->source.up);
    expect_same(our->source.down, their->source.down);
  }
}

TEST(GateUpOrder, IsGivenThroughTheCInterface) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (const int64_t layer : builder.layers()) stack_experts(builder, layer, GateUpOrder::kUpFirst);
  builder.tensors()["model.layers.0.mlp.experts.output_scale"] = {DType::kF32, {1}, Bytes(4)};
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const std::string path = dir.path().string();
  auto options = nvfp4_moe::make<nvfp4_moe_checkpoint_options>();
  nvfp4_moe_checkpoint* checkpoint = nullptr;
  options.gate_up_order = "sideways";
  EXPECT_EQ(nvfp4_moe_checkpoint_open_with(path.c_str(), &options, &checkpoint), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("gate_up_order: expected one of gate_first, up_first, interleaved"));
  options.gate_up_order = "up_first";
  options.accept_count = 1;
  EXPECT_EQ(nvfp4_moe_checkpoint_open_with(path.c_str(), &options, &checkpoint), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  const char* const accepted[] = {"*.output_scale"};
  options.accept_tensors = accepted;
  ASSERT_EQ(nvfp4_moe_checkpoint_open_with(path.c_str(), &options, &checkpoint), NVFP4_MOE_STATUS_OK);
  char* text = nullptr;
  ASSERT_EQ(nvfp4_moe_checkpoint_findings(checkpoint, -1, &text), NVFP4_MOE_STATUS_OK);
  EXPECT_THAT(std::string(text), HasSubstr("accepted_tensor"));
  EXPECT_THAT(std::string(text), HasSubstr("up_first, as gate_up_order says"));
  nvfp4_moe_text_free(text);
  nvfp4_moe_checkpoint_close(checkpoint);
  EXPECT_EQ(nvfp4_moe_checkpoint_open_with(path.c_str(), nullptr, &checkpoint), NVFP4_MOE_STATUS_OK);
  nvfp4_moe_checkpoint_close(checkpoint);
}

}  // namespace
}  // namespace nvfp4_moe::internal::gate_up_order_test
