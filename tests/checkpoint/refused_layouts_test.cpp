// Layers whose experts are stored in a way that is not read: they are named by what they hold.
#include <algorithm>

#include "checkpoint/checkpoint.h"
#include "support/checkpoint_builder.h"
#include "support/support.h"

namespace nvfp4_moe::internal::layouts_test {
namespace {

using test::CheckpointBuilder;
using test::RawTensor;
using test::TempDir;
using testing::HasSubstr;

// gate and up in NVFP4, down in FP8: a layer that is not supported, not one with a tensor missing.
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
      builder.tensors().erase("model.layers.1.mlp.experts." + std::to_string(e) + ".down_proj.weight_global_scale");
    }
    TempDir dir;
    ASSERT_OK(builder.write(dir.path().string()));
    const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
    ASSERT_OK(checkpoint);
    EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{0}));
    EXPECT_THAT(checkpoint->expert(1, 0).status().message(),
                HasSubstr("'model.layers.1.mlp.experts.0.down_proj.weight', FP8 experts are not NVFP4"));
    EXPECT_OK(checkpoint->expert(0, 0));
  }
}

// One expert of a layer in another format is named by what is stored.
TEST(RefusedLayouts, AnExpertInAnotherFormatIsNotCalledMissing) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .format = SourceFormat::kCompressedTensors});
  auto node = builder.tensors().extract(builder.tensor_name(1, 5, "down", "codes"));
  node.mapped().dtype = DType::kF8E4M3;
  node.key() = "model.layers.1.mlp.experts.5.down_proj.weight";
  builder.tensors().insert(std::move(node));
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  const auto& findings = checkpoint->findings();
  const auto finding =
      std::find_if(findings.begin(), findings.end(), [](const Finding& found) { return found.id == "missing_expert"; });
  ASSERT_NE(finding, findings.end());
  EXPECT_EQ(finding->expert, 5);
  EXPECT_THAT(finding->actual,
              HasSubstr("model.layers.1.mlp.experts.5.down_proj.weight in another format, (64, 16) F8_E4M3"));
}

// The number of experts is the config's for all layers: one that was pruned apart is named as such.
TEST(RefusedLayouts, ALayerWithFewerExpertsIsNamedAsSuch) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  for (const int64_t e : {6, 7}) {
    for (const char* projection : {"gate", "up", "down"})
      for (const char* part : {"codes", "scales", "tensor_scale", "input_scale"})
        builder.tensors().erase(builder.tensor_name(1, e, projection, part));
  }
  builder.tensors()["model.layers.1.mlp.gate.weight"] = {DType::kBf16, {6, 64}, std::vector<uint8_t>(6 * 64 * 2)};
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  ASSERT_OK(checkpoint);
  EXPECT_THAT(checkpoint->check_layout(1, {0, 8}).message(), HasSubstr("a layer of 6 experts, as its router has"));
  EXPECT_OK(checkpoint->check_layout(0, {0, 8}));
}

// MLX's words and its `scales`, as mlx-lm converts a model.
TEST(RefusedLayouts, MlxIsRefusedByName) {
  for (const char* stem : {"model.layers.0.mlp.switch_mlp.", "model.layers.0.mlp.experts."}) {
    CheckpointBuilder builder({.model_type = "qwen3_moe", .format = SourceFormat::kFloat, .layers = 1});
    std::erase_if(builder.tensors(),
                  [](const auto& tensor) { return tensor.first.find(".experts.") != std::string::npos; });
    builder.tensors()[stem + std::string("gate_proj.weight")] = {DType::kU32, {1, 1, 8}, std::vector<uint8_t>(32)};
    builder.tensors()[stem + std::string("gate_proj.scales")] = {DType::kU8, {1, 1, 4}, std::vector<uint8_t>(4)};
    builder.config()["quantization"] = {{"group_size", 16}, {"bits", 4}, {"mode", "nvfp4"}};
    builder.config()["quantization_config"] = builder.config()["quantization"];
    TempDir dir;
    ASSERT_OK(builder.write(dir.path().string()));
    const Status refused = Checkpoint::open(dir.path().string()).status();
    EXPECT_EQ(refused.code(), Code::kUnsupported);
    EXPECT_THAT(refused.message(), HasSubstr("MLX's layout"));
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::layouts_test
