// A config that declares far more than the files hold costs no more than the files.
#include <sys/resource.h>

#include <chrono>

#include "checkpoint/experts.h"
#include "convert/quantize_checkpoint.h"
#include "moe/packed_cache.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr int64_t kMost = 65536;  // the largest number of experts that a config may declare

int64_t peak_bytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

// Everything that inspect, verify and a load read from the checkpoint. The bounds are a hundred
// times the usual cost.
void expect_cheap(const std::string& path, const std::string& finding) {
  attacked();
  const auto start = std::chrono::steady_clock::now();
  const int64_t before = peak_bytes();
  const auto checkpoint = must(Checkpoint::open(path));
  const int64_t experts = checkpoint->model().options.num_experts;
  for (const int64_t layer : checkpoint->model().layers) {
    const auto findings = must(checkpoint->validate(layer, {0, experts}));
    ASSERT_FALSE(findings->empty());
    EXPECT_EQ(findings->front().id, finding);
    EXPECT_LE(findings->size(), 8u);
    for (const Finding& one : *findings) EXPECT_LE(one.examples.size(), Finding::kMaxExamples);
    EXPECT_OK(checkpoint->statistics(layer, {0, experts}));
    EXPECT_OK(checkpoint->layer_scales(layer));
    const Status refused = checkpoint->check_layout(layer, {0, experts});
    EXPECT_EQ(refused.code(), Code::kBadInput);
    EXPECT_EQ(refused.finding(), finding);
    EXPECT_EQ(open_checkpoint_layer(*checkpoint, layer, {}, {}, {}, {}, {}).status().finding(),
              finding);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_LT(seconds.count(), 10.0);
  EXPECT_LT(peak_bytes() - before, int64_t{64} << 20);
}

ATTACK_TEST(kHostileFiles, HostileSizes, ExpertsThatAreNotThereAreOneFinding) {
  CheckpointBuilder builder({.model_type = "qwen3_moe",
                             .layers = 100,
                             .num_experts = 1,
                             .top_k = 1,
                             .hidden_size = 32,
                             .intermediate_size = 16});
  builder.config()["num_experts"] = kMost;
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  expect_cheap(dir.path().string(), "missing_expert");
  const Result<Checkpoint> checkpoint = Checkpoint::open(dir.path().string());
  const Finding finding = checkpoint->validate(7, {0, kMost})->front();
  EXPECT_EQ(finding.count, kMost - 1);
  EXPECT_EQ(finding.expert, 1);
  EXPECT_EQ(finding.tensor, "model.layers.7.mlp.experts.1.gate_proj.weight");
}

ATTACK_TEST(kHostileFiles, HostileSizes, SizesThatTheTensorsDoNotHave) {
  CheckpointBuilder builder({.model_type = "qwen3_moe", .layers = 2});
  builder.config().update({{"hidden_size", 1 << 20}, {"moe_intermediate_size", 1 << 20}});
  TempDir dir;
  ASSERT_OK(builder.write(dir.path().string()));
  expect_cheap(dir.path().string(), "shape_mismatch");
}

ATTACK_TEST(kHostileFiles, HostileSizes, AStackOfMoreExpertsThanItHas) {
  CheckpointBuilder builder(
      {.model_type = "qwen3_5_moe", .format = SourceFormat::kFloat, .stacked_floats = true});
  builder.config()["text_config"]["num_experts"] = kMost;
  TempDir dir;
  ASSERT_OK(builder.write(dir.file("model")));
  expect_cheap(dir.file("model"), "shape_mismatch");
  // Quantizing plans a dozen tensors for each expert.
  const int64_t before = peak_bytes();
  attacked();
  EXPECT_THAT(quantize_checkpoint(dir.file("model"), dir.file("out"), {}),
              Refused(Code::kBadInput, "shape_mismatch"));
  EXPECT_LT(peak_bytes() - before, int64_t{64} << 20);
}

ATTACK_TEST(kHostileFiles, HostileSizes, LayersThatAreNotThere) {
  CheckpointBuilder builder({.model_type = "qwen3_moe"});
  builder.config()["num_hidden_layers"] = 1 << 14;
  const Opened checkpoint(builder);
  attacked();
  const Finding* missing = find(checkpoint->findings(), "missing_layer");
  ASSERT_NE(missing, nullptr);
  EXPECT_EQ(missing->count, (1 << 14) - 2);
  EXPECT_EQ(missing->examples.size(), Finding::kMaxExamples);
  EXPECT_LT(checkpoint->findings().size(), 16u);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
