#include "convert/synthesize.h"

#include <cmath>

#include "core/float_formats.h"
#include "quantize/models.h"
#include "support/read_tensor.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr uint64_t kGoldenHash = 13186244624814334209ull;

SynthesizeOptions two_layers() { return tiny_model(2, 4, 128, 64); }

uint64_t hash_of(const TensorIndex& index) {
  uint64_t h = 0xCBF29CE484222325ull;
  for (const auto& [name, ref] : index.tensors()) {
    for (const char c : name) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001B3ull;
    for (const uint8_t byte : read_tensor<uint8_t>(*ref.file, *ref.info))
      h = (h ^ byte) * 0x100000001B3ull;
  }
  return h;
}

TEST(Synthesize, HasTheOfficialNamesShapesAndConfig) {
  TempDir dir;
  const auto made = must(synthesize_checkpoint(dir.file("m"), two_layers()));
  EXPECT_GT(made->shards, 1);
  EXPECT_EQ(made->expert_bytes, 2ull * 4 * 3 * 128 * 64 * 2);
  const auto checkpoint = must(Checkpoint::open(dir.file("m")));
  EXPECT_EQ(checkpoint->model().family, "deepseek_v4");
  EXPECT_EQ(checkpoint->model().format, SourceFormat::kFloat);
  EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{0, 1}));
  const auto options = must(checkpoint->layer_options(1));
  EXPECT_EQ(options->num_experts, 4);
  EXPECT_EQ(options->top_k, 2);
  EXPECT_EQ(options->activation, Activation::kSwigluClamped);
  EXPECT_EQ(options->swiglu_limit, 10.0f);
  EXPECT_EQ(options->router_weight, RouterWeight::kBeforeDown);
  for (const char* name :
       {"embed.weight", "head.weight", "norm.weight", "layers.0.ffn.gate.tid2eid",
        "layers.1.ffn.gate.bias", "layers.1.ffn.gate.weight", "layers.0.attn.wq_a.weight",
        "layers.1.ffn.shared_experts.w2.weight", "layers.1.ffn.experts.3.w3.weight"})
    EXPECT_NE(checkpoint->index().find(name).info, nullptr) << name;
  const TensorInfo& w2 = *checkpoint->index().find("layers.0.ffn.experts.0.w2.weight").info;
  EXPECT_EQ(w2.shape, (std::vector<int64_t>{128, 64}));
  EXPECT_EQ(w2.dtype, DType::kBf16);
}

// The bytes are part of the interface: recorded results refer to them by seed. A change here is a
// change of the data.
TEST(Synthesize, SameSeedSameBytesOnEveryMachine) {
  TempDir dir;
  SynthesizeOptions o = two_layers();
  ASSERT_OK(synthesize_checkpoint(dir.file("a"), o));
  const auto pool = make_thread_pool(3);
  o.executor = pool.get();
  o.max_shard_bytes = 1 << 20;
  ASSERT_OK(synthesize_checkpoint(dir.file("b"), o));
  o.seed = 2;
  ASSERT_OK(synthesize_checkpoint(dir.file("c"), o));
  const auto a = must(TensorIndex::open(dir.file("a"))), b = must(TensorIndex::open(dir.file("b"))),
             c = must(TensorIndex::open(dir.file("c")));
  EXPECT_EQ(hash_of(*a), hash_of(*b));
  EXPECT_NE(hash_of(*a), hash_of(*c));
  EXPECT_EQ(hash_of(*a), kGoldenHash);
}

TEST(Synthesize, RefusesBadOptionsAndUsedDirectories) {
  TempDir dir;
  const auto code = [&](auto change) {
    SynthesizeOptions o = two_layers();
    change(o);
    return synthesize_checkpoint(dir.file("x"), o).status().code();
  };
  EXPECT_EQ(code([](auto& o) { o.hidden_size = 100; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.layers = 0; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.top_k = 5; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.family = "gpt2"; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.dtype = DType::kI32; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.family = "qwen3_moe", o.latent_size = 48; }),
            Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& o) { o.progress = [](const Progress&) { return false; }; }),
            Code::kCancelled);
  EXPECT_EQ(code([](auto& o) { o.family = "qwen3_moe", o.dtype = DType::kF16; }), Code::kOk);
  const auto checkpoint = must(Checkpoint::open(dir.file("x")));
  EXPECT_EQ(checkpoint->model().model_type, "qwen3_moe");
  EXPECT_EQ(checkpoint->layer_options(0)->activation, Activation::kSwiglu);
  EXPECT_OK(checkpoint->expert(1, 3));
  EXPECT_EQ(code([](auto&) {}), Code::kInvalidArgument) << "the directory holds a checkpoint now";
}

// Experts without a gate, of the model's width and after a latent projection.
TEST(Synthesize, NemotronShapeLoadsToo) {
  TempDir dir;
  SynthesizeOptions o = two_layers();
  o.family = "nemotron_h";
  for (const int64_t latent : {int64_t{0}, int64_t{48}}) {
    o.latent_size = latent;
    const std::string path = dir.file("m" + std::to_string(latent));
    const auto made = must(synthesize_checkpoint(path, o));
    EXPECT_EQ(made->expert_bytes,
              static_cast<uint64_t>(2 * 4 * 2 * (latent == 0 ? 128 : latent) * 64 * 2));
    const auto checkpoint = must(Checkpoint::open(path));
    EXPECT_EQ(checkpoint->model().family, "nemotron_h");
    EXPECT_EQ(checkpoint->model().layers, (std::vector<int64_t>{1, 3}));
    EXPECT_EQ(checkpoint->model().model_hidden_size, 128);
    const auto options = must(checkpoint->layer_options(3));
    EXPECT_EQ(options->activation, Activation::kRelu2);
    EXPECT_EQ(options->hidden_size, latent == 0 ? 128 : latent);
    EXPECT_EQ(options->shared_intermediate_size, latent == 0 ? 128 : 0);
    const auto expert = must(checkpoint->expert(3, 2));
    EXPECT_EQ(expert->source.gate.rows, 0);
    EXPECT_EQ(expert->source.up.rows, 64);
    EXPECT_EQ(expert->source.down.rows, options->hidden_size);
    const auto found = must(checkpoint->validate(3, {0, 4}));
    for (const Finding& finding : *found)
      EXPECT_NE(finding.severity, Severity::kError) << to_string(finding);
    if (latent == 0) {
      EXPECT_OK(checkpoint->shared_expert(3));
    } else {
      EXPECT_EQ(checkpoint->shared_expert(3).status().code(), Code::kUnsupported);
      EXPECT_NE(checkpoint->index().find("backbone.layers.1.mixer.fc1_latent_proj.weight").info,
                nullptr);
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
