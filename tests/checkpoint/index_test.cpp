// A tensor with several copies is read from the file that model.safetensors.index.json names.
#include <nlohmann/json.hpp>

#include "checkpoint/experts.h"
#include "io/output_file.h"

namespace nvfp4_moe::internal::test::index_test {
namespace {

using Tensors = std::map<std::string, RawTensor>;

// The model's tensors in base.safetensors, except that those of `overlay` have altered bytes there
// and correct ones in overlay.safetensors. The index does not name `leftovers`.
struct Repository {
  TempDir dir;
  CheckpointBuilder builder{{.model_type = "qwen3_moe"}};
  Tensors overlay, leftovers;

  Result<Checkpoint> open() {
    NVFP4_MOE_TRY(builder.write(dir.path().string()));
    std::filesystem::remove(dir.file("model.safetensors"));
    Tensors base = builder.tensors();
    nlohmann::json map;
    for (auto& [name, tensor] : base) map[name] = "base.safetensors";
    for (const auto& [name, tensor] : overlay) {
      for (uint8_t& byte : base[name].bytes) byte ^= 0x11;
      map[name] = "overlay.safetensors";
    }
    base.insert(leftovers.begin(), leftovers.end());
    NVFP4_MOE_TRY(write_tensors(dir.file("base.safetensors"), base));
    if (!overlay.empty()) NVFP4_MOE_TRY(write_tensors(dir.file("overlay.safetensors"), overlay));
    NVFP4_MOE_TRY(write_text_file(dir.file("model.safetensors.index.json"),
                                  nlohmann::json{{"weight_map", map}}.dump()));
    return Checkpoint::open(dir.path().string());
  }
};

TEST(Index, DecidesBetweenSupersededCopies) {
  Repository model;
  for (const char* projection : {"gate", "up", "down"}) {
    const std::string name = model.builder.tensor_name(0, 3, projection, "codes");
    model.overlay[name] = model.builder.tensors().at(name);
  }
  const auto checkpoint = must(model.open());
  const Finding* finding = find(checkpoint->findings(), "superseded_tensor");
  ASSERT_NE(finding, nullptr);
  EXPECT_EQ(finding->count, 3);
  EXPECT_EQ(finding->severity, Severity::kWarning);
  expect_same(checkpoint->expert(0, 3), model.builder, 0, 3);
  // Without an index the right copy is ambiguous.
  std::filesystem::remove(model.dir.file("model.safetensors.index.json"));
  EXPECT_THAT(Checkpoint::open(model.dir.path().string()),
              Refused(Code::kBadInput, "holds it too"));
}

// Leftovers that resemble experts: stacks of the float original, FP8 scales, plain weights, a
// further layer.
TEST(Index, LeavesOutWhatItDoesNotName) {
  for (const char* name : {"model.layers.0.mlp.experts.gate_up_proj",
                           "model.layers.0.mlp.experts.3.up_proj.weight_scale_inv",
                           "model.layers.1.mlp.experts.2.up_proj.weight_packed",
                           "model.layers.1.mlp.experts.9.up_proj.weight",
                           "model.layers.2.mlp.experts.0.up_proj.weight",
                           "model.layers.0.mlp.experts.3.up_proj.lora_A.weight"}) {
    SCOPED_TRACE(name);
    Repository model;
    model.leftovers[name] = {DType::kBf16, {2, 2}, std::vector<uint8_t>(8, 0x3F)};
    const auto checkpoint = must(model.open());
    const Finding* finding = find(checkpoint->findings(), "unindexed_tensor");
    ASSERT_NE(finding, nullptr);
    EXPECT_EQ(finding->tensor, name);
    EXPECT_EQ(find(checkpoint->findings(), "unknown_expert_tensor"), nullptr);
    for (const int64_t layer : {0, 1}) EXPECT_OK(checkpoint->expert(layer, 3));
  }
}

// An index that was not updated: the message points out that the tensor is in a file.
TEST(Index, ATensorThatItForgotIsNotCalledMissing) {
  Repository model;
  const std::string name = model.builder.tensor_name(1, 3, "up", "tensor_scale");
  model.leftovers.insert(model.builder.tensors().extract(name));
  EXPECT_THAT(
      must(model.open())->expert(1, 3).status().message(),
      HasSubstr(
          name +
          ": expected () or (1) F32, got one that model.safetensors.index.json does not name"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::index_test
