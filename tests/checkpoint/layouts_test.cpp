// Layouts that real producers write and the builder does not: names with the projection first, gate and up of a shared
// expert in one tensor, layers in different formats, stacks whose shape fits both orders of their axes.
#include <cstring>

#include "checkpoint/checkpoint.h"
#include "checkpoint/float_experts.h"
#include "checkpoint/read_all.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::layouts_test {
namespace {

using test::BuilderOptions;
using test::BuiltMatrix;
using test::CheckpointBuilder;
using test::codes_of;
using test::RawTensor;
using test::scales_of;
using test::TempDir;
using testing::HasSubstr;

void expect_same(const Nvfp4View& view, const BuiltMatrix& built) {
  EXPECT_EQ(codes_of(view), built.codes);
  EXPECT_EQ(scales_of(view), built.scales);
  EXPECT_EQ(view.tensor_scale, built.tensor_scale);
}
void expect_same(const Nvfp4View& view, const Nvfp4View& other) {
  EXPECT_EQ(codes_of(view), codes_of(other));
  EXPECT_EQ(scales_of(view), scales_of(other));
  EXPECT_EQ(view.tensor_scale, other.tensor_scale);
}

const Finding* find(const std::vector<Finding>& findings, const std::string& id) {
  for (const Finding& finding : findings) {
    if (finding.id == id) return &finding;
  }
  return nullptr;
}

// "experts.7.gate_proj." -> "experts.gate_proj.7.", as ModelOpt writes Qwen3-VL-MoE.
void turn_names(CheckpointBuilder& builder, int64_t layer) {
  const std::string stem = "model.layers." + std::to_string(layer) + ".mlp.experts.";
  for (int64_t e = 0; e < builder.options().num_experts; ++e) {
    for (const char* projection : {"gate", "up", "down"}) {
      for (const char* part : {"codes", "scales", "tensor_scale", "input_scale"}) {
        const std::string name = builder.tensor_name(layer, e, projection, part);
        auto node = builder.tensors().extract(name);
        node.key() = stem + projection + "_proj." + std::to_string(e) + name.substr(name.rfind('.'));
        builder.tensors().insert(std::move(node));
      }
    }
  }
}

TEST(Layouts, ProjectionBeforeTheExpertsNumber) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.config()["model_type"] = "qwen3_vl_moe";
  for (const int64_t layer : builder.layers()) turn_names(builder, layer);
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->model().layers, builder.layers());
  EXPECT_EQ(checkpoint->tensor_name(1, 5, "down"), "model.layers.1.mlp.experts.down_proj.5.weight");
  EXPECT_EQ(find(checkpoint->findings(), "missing_expert"), nullptr);
  for (int64_t e = 0; e < 8; ++e) {
    const Result<LoadedExpert> loaded = checkpoint->expert(1, e);
    ASSERT_OK(loaded);
    expect_same(loaded->source.gate, builder.matrix(1, e, "gate"));
    expect_same(loaded->source.up, builder.matrix(1, e, "up"));
    expect_same(loaded->source.down, builder.matrix(1, e, "down"));
  }
  EXPECT_TRUE(checkpoint->validate(1, {0, 8})->empty());
  EXPECT_TRUE(checkpoint->layer_scales(1)->hidden.has_value());
}

// A layer's experts whose names no single rule makes: the message says in what they differ, and names one of each kind.
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
       "whose projections are called differently: " + first + " and model.layers.0.mlp.experts.0.w1.weight"},
  };
  for (const auto& c : cases) {
    CheckpointBuilder builder({.model_type = "qwen3_moe"});
    builder.tensors()[c.added] = {DType::kU8, {1}, {0}};
    TempDir dir;
    ASSERT_OK(builder.write(dir.path().string()));
    EXPECT_EQ(Checkpoint::open(dir.path().string()).status().message(),
              "layer 0: experts under several names, " + c.says)
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
    TempDir dir;
    ASSERT_OK(builder.write(dir.file("fused")));
    ASSERT_OK(plain.write(dir.file("plain")));
    const Result<Checkpoint> fused = Checkpoint::open(dir.file("fused"));
    const Result<Checkpoint> apart = Checkpoint::open(dir.file("plain"));
    ASSERT_OK(fused);
    ASSERT_OK(apart);
    EXPECT_EQ(find(fused->findings(), "shared_expert_not_loaded"), nullptr);
    const int64_t layer = builder.layers().front();
    EXPECT_EQ(fused->layer_options(layer)->shared_intermediate_size, 32);
    EXPECT_OK(fused->check_layout(layer, {0, 8}));
    for (const IntermediateSlice slice : {IntermediateSlice{}, {16, 16}}) {
      const Result<LoadedExpert> ours = fused->shared_expert(layer, slice);
      const Result<LoadedExpert> theirs = apart->shared_expert(layer, slice);
      ASSERT_OK(ours);
      ASSERT_OK(theirs);
      expect_same(ours->source.gate, theirs->source.gate);
      expect_same(ours->source.up, theirs->source.up);
      expect_same(ours->source.down, theirs->source.down);
    }
  }
}

// As transformers writes MiniMax-M3, whose own shared size the config gives.
TEST(Layouts, MinimaxM3SharedExpert) {
  CheckpointBuilder builder({.model_type = "minimax_m3", .format = SourceFormat::kFloat});
  builder.config()["text_config"].update({{"shared_intermediate_size", 32}, {"n_shared_experts", 1}});
  auto& tensors = builder.tensors();
  for (const int64_t layer : builder.layers()) {
    const auto routed = [&](const char* p) { return tensors.at(builder.tensor_name(layer, 2, p, "codes")); };
    const std::string stem =
        "language_model.model.layers." + std::to_string(layer) + ".block_sparse_moe.shared_experts.";
    RawTensor both = routed("gate");
    const RawTensor up = routed("up");
    both.shape[0] *= 2;
    both.bytes.insert(both.bytes.end(), up.bytes.begin(), up.bytes.end());
    const RawTensor down = routed("down");
    tensors[stem + "gate_up_proj.weight"] = both;
    tensors[stem + "down_proj.weight"] = down;
  }
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->model().shared_experts, 1);
  const Result<LoadedExpert> shared = checkpoint->shared_expert(1);
  const Result<LoadedExpert> same = checkpoint->expert(1, 2);
  ASSERT_OK(shared);
  ASSERT_OK(same);
  expect_same(shared->source.gate, same->source.gate);
  expect_same(shared->source.up, same->source.up);
  expect_same(shared->source.down, same->source.down);
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
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{1, 2}));
  const Finding* finding = find(checkpoint->findings(), "layer_not_supported");
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->severity, Severity::kWarning);
  EXPECT_EQ(finding->layer, 0);
  EXPECT_EQ(finding->actual, "FP8 experts are not NVFP4");
  EXPECT_EQ(find(checkpoint->findings(), "missing_layer"), nullptr);
  const Status refused = checkpoint->expert(0, 0).status();
  EXPECT_EQ(refused.code(), Code::kUnsupported);
  EXPECT_EQ(refused.message(), "layer 0: model.layers.0.mlp.experts.0.gate_proj.weight: FP8 experts are not NVFP4");
  const Result<LoadedExpert> loaded = checkpoint->expert(2, 7);
  ASSERT_OK(loaded);
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
  builder.config()["quantization_config"] = {
      {"quant_method", "modelopt"}, {"quant_algo", "mixed_precision"}, {"quantized_layers", layers}};
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(checkpoint->layer_options(1)->activation_format, ActivationFormat::kNvfp4);
  EXPECT_EQ(checkpoint->layer_options(2)->activation_format, ActivationFormat::kBf16);
  EXPECT_THAT(checkpoint->expert(0, 0).status().message(),
              HasSubstr("quantized_layers: quant_algo FP8: FP8 experts are not NVFP4"));
}

// A layer quantizes the activations of both or of neither.
TEST(Layouts, ASharedExpertWithOtherActivationsIsNotLoaded) {
  CheckpointBuilder builder({.model_type = "qwen2_moe", .format = SourceFormat::kCompressedTensors});
  nlohmann::json& groups = builder.config()["quantization_config"]["config_groups"];
  groups["group_1"] = groups["group_0"];
  groups["group_0"]["targets"] = {"re:.*mlp.experts.*"};
  groups["group_1"]["targets"] = {"re:.*self_attn.*", "re:.*shared_expert.*"};
  const auto open = [&] {
    const TempDir dir;
    EXPECT_OK(builder.write(dir.path().string()));
    Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
    EXPECT_OK(checkpoint);
    return std::pair(checkpoint->layer_options(0)->shared_intermediate_size, checkpoint->findings());
  };
  EXPECT_EQ(open().first, 32);
  groups["group_1"]["input_activations"] = nullptr;
  const auto [size, findings] = open();
  EXPECT_EQ(size, 0);
  const Finding* finding = find(findings, "shared_expert_not_loaded");
  ASSERT_NE(finding, nullptr);
  EXPECT_THAT(finding->actual, HasSubstr("bf16 activations next to routed experts with nvfp4"));
}

// (E, rows, cols) of two-byte elements to (E, cols, rows).
void turn_stack(RawTensor& tensor) {
  const int64_t stack = tensor.shape[0], rows = tensor.shape[1], cols = tensor.shape[2];
  std::vector<uint8_t> out(tensor.bytes.size());
  for (int64_t e = 0; e < stack; ++e) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c)
        std::memcpy(&out[static_cast<size_t>(2 * ((e * cols + c) * rows + r))],
                    &tensor.bytes[static_cast<size_t>(2 * ((e * rows + r) * cols + c))], 2);
    }
  }
  tensor.bytes = out;
  std::swap(tensor.shape[1], tensor.shape[2]);
}

// 2 I = H makes gate_up_proj square, I = H makes down_proj square: the other of the two says which axis is K.
TEST(Layouts, ASquareStackHasTheOrderOfTheOther) {
  for (const int64_t intermediate : {32, 64}) {
    for (const bool turned : {false, true}) {
      SCOPED_TRACE(testing::Message() << "intermediate " << intermediate << (turned ? ", K is axis 1" : ""));
      BuilderOptions options{.model_type = "qwen3_5_moe",
                             .format = SourceFormat::kFloat,
                             .stacked_floats = true,
                             .num_experts = 2,
                             .hidden_size = 64,
                             .intermediate_size = intermediate};
      CheckpointBuilder builder(options);
      for (const int64_t layer : builder.layers()) {
        for (const char* projection : {"gate", "down"}) {
          if (turned) turn_stack(builder.tensors().at(builder.tensor_name(layer, 0, projection, "codes")));
        }
      }
      TempDir dir;
      ASSERT_OK(builder.write(dir.path().string()));
      const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
      ASSERT_OK(checkpoint);
      const Result<LoadedExpert> loaded = checkpoint->expert(1, 1);
      ASSERT_OK(loaded);
      expect_same(loaded->source.gate, builder.matrix(1, 1, "gate"));
      expect_same(loaded->source.up, builder.matrix(1, 1, "up"));
      expect_same(loaded->source.down, builder.matrix(1, 1, "down"));
      Result<FloatExpert> floats = float_expert(*checkpoint, 1, 1);
      ASSERT_OK(floats);
      std::vector<float> row(64);
      ASSERT_OK(floats->up.fetch());
      floats->up.read_row(3, row.data());
      for (size_t c = 0; c < row.size(); ++c) EXPECT_EQ(row[c], builder.matrix(1, 1, "up").weights[3 * 64 + c]) << c;
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::layouts_test
