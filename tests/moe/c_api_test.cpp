// The C interface computes the same as the library.
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/dequantize.h"
#include "moe/c_layer.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
using testing::HasSubstr;

TEST(CApi, RunsTheSameLayer) {
  MoeOptions options = tiny_options();
  options.shared_intermediate_size = 32;
  const CLayer c(options);
  TinyBatch batch(options, 9);
  const std::vector<float> expected = c.expected(batch);
  const nvfp4_moe::Layer layer = c.open();
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(16));
  batch.out.assign(batch.out.size(), -1.0f);
  layer.run(c_batch(batch), workspace);
  EXPECT_TRUE(same_bits(batch.out, expected));
  EXPECT_EQ(layer.status(workspace).bad_expert_ids, 0u);
  EXPECT_GT(layer.status(workspace).hidden_blocks, 0u);
  EXPECT_EQ(nlohmann::json::parse(layer.describe())["shared_intermediate_size"], 32);
}

TEST(CApi, StatusCountsWeightsAndOutputs) {
  const CLayer c;
  TinyBatch batch(c.tiny.options, 9);
  const nvfp4_moe::Layer layer = c.open();
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(16));
  batch.ids[3] = -1;
  batch.weights[3] = batch.weights[8] = std::numeric_limits<float>::quiet_NaN();
  batch.weights[11] = std::numeric_limits<float>::infinity();
  layer.run(c_batch(batch), workspace);
  EXPECT_EQ(layer.status(workspace).nonfinite_weights, 2u);
  EXPECT_EQ(layer.status(workspace).nonfinite_outputs, 2u * 64);
  EXPECT_EQ(layer.status(workspace).nonfinite_tokens, 0u);
  TinyBatch clean(c.tiny.options, 9);
  layer.run(c_batch(clean), workspace);
  EXPECT_EQ(layer.status(workspace).nonfinite_weights, 0u);
  EXPECT_EQ(layer.status(workspace).nonfinite_outputs, 0u);
}

TEST(CApi, ARunOfFewerTokensNeedsALargeEnoughWorkspaceOnly) {
  const CLayer c;
  const nvfp4_moe::Layer layer = c.open();
  TinyBatch batch(c.tiny.options, 2), larger(c.tiny.options, 16);
  const std::vector<float> expected = c.expected(batch);
  EXPECT_LT(layer.workspace_bytes(2), layer.workspace_bytes(16));
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(2));
  layer.run(c_batch(batch), workspace);
  EXPECT_TRUE(same_bits(batch.out, expected));
  EXPECT_THROW(layer.run(c_batch(larger), workspace), nvfp4_moe::Error);
  EXPECT_THROW(layer.workspace_bytes(-1), nvfp4_moe::Error);
  EXPECT_THROW(layer.workspace_bytes(17), nvfp4_moe::Error);
  const auto run = nlohmann::json::parse(layer.describe_run(2));
  EXPECT_EQ(run["tokens"], 2);
  EXPECT_EQ(run["workspace_bytes"], layer.workspace_bytes(2));
  EXPECT_TRUE(run["steps"].contains("gemm1_swiglu"));
  EXPECT_THROW(layer.describe_run(17), nvfp4_moe::Error);
}

TEST(CApi, GateAndUpMayBeHalvesOfOneTensor) {
  CLayer c;
  TinyBatch batch(c.tiny.options, 9);
  const std::vector<float> expected = c.expected(batch);
  const size_t codes = 48 * 32, scales = 48 * 4;
  std::vector<uint8_t> fused_codes, fused_scales;  // (E, 2I, H/2), (E, 2I, H/16)
  for (const Expert& e : c.tiny.experts)
    for (const Matrix* m : {&e.gate, &e.up}) {
      fused_codes.insert(fused_codes.end(), m->codes.begin(), m->codes.end());
      fused_scales.insert(fused_scales.end(), m->block_scales.begin(), m->block_scales.end());
    }
  c.tensors.gate_codes = fused_codes.data();
  c.tensors.up_codes = fused_codes.data() + codes;
  c.tensors.gate_block_scales = fused_scales.data();
  c.tensors.up_block_scales = fused_scales.data() + scales;
  c.tensors.gate_up_codes_stride = 2 * codes;
  c.tensors.gate_up_scales_stride = 2 * scales;
  const nvfp4_moe::Layer layer = c.open();
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(16));
  layer.run(c_batch(batch), workspace);
  EXPECT_TRUE(same_bits(batch.out, expected));
  c.tensors.gate_up_codes_stride = 5;
  EXPECT_EQ(c.try_open(), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
}

TEST(CApi, HostThreadsAreLent) {
  CLayer c;
  TinyBatch batch(c.tiny.options, 9);
  const std::vector<float> expected = c.expected(batch);
  int calls = 0;
  c.options.threads = 0;
  c.options.parallel_for_user = &calls;
  c.options.parallel_for = [](int64_t count, int64_t grain, nvfp4_moe_parallel_body body,
                              void* context, void* user) {
    ++*static_cast<int*>(user);
    std::thread half([&] {
      for (int64_t i = 0; i < count / 2; i += grain)
        body(context, i, std::min(i + grain, count / 2));
    });
    for (int64_t i = count / 2; i < count; i += grain) body(context, i, std::min(i + grain, count));
    half.join();
    body(context, -5, 0);  // ranges outside the loop are cut off
    body(context, count, count + 5);
  };
  const nvfp4_moe::Layer layer = c.open();
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(16));
  layer.run(c_batch(batch), workspace);
  EXPECT_GT(calls, 0);
  EXPECT_TRUE(same_bits(batch.out, expected));
}

TEST(CApi, ProgressIsToldAndCancels) {
  CLayer c;
  struct Told {
    std::vector<std::string> items;
    int32_t go_on = 1;
  } told;
  c.options.progress_user = &told;
  c.options.progress = [](const nvfp4_moe_progress* progress, void* user) {
    EXPECT_EQ(progress->struct_size, sizeof(nvfp4_moe_progress));
    EXPECT_STREQ(progress->what, "pack");
    auto& t = *static_cast<Told*>(user);
    t.items.emplace_back(progress->item);
    return t.go_on;
  };
  EXPECT_EQ(c.try_open(), kOk);
  EXPECT_EQ(told.items.size(), 4u);
  EXPECT_EQ(told.items[2], "expert 2");
  told = {{}, 0};
  EXPECT_EQ(c.try_open(), NVFP4_MOE_STATUS_CANCELLED);
  EXPECT_EQ(told.items.size(), 1u);
}

TEST(CApi, ReplacesAndUnpacks) {
  CLayer c;
  nvfp4_moe::Layer layer = c.open();
  layer.replace_expert(1, CLayer::expert(c.tiny.experts[3]));
  Expert got = c.tiny.experts[0];
  auto out = nvfp4_moe::make<nvfp4_moe_expert_out>();
  out.gate_codes = got.gate.codes.data();
  out.up_block_scales = got.up.block_scales.data();
  out.down_codes = got.down.codes.data();  // the others are left out
  layer.unpack_expert(1, out);
  EXPECT_EQ(got.gate.codes, c.tiny.experts[3].gate.codes);
  EXPECT_EQ(got.up.block_scales, c.tiny.experts[3].up.block_scales);
  EXPECT_EQ(got.down.codes, c.tiny.experts[3].down.codes);
  EXPECT_EQ(got.up.codes, c.tiny.experts[0].up.codes);
  EXPECT_EQ(out.down_tensor_scale, c.tiny.experts[3].down.tensor_scale);
  EXPECT_THROW(layer.replace_expert(4, CLayer::expert(c.tiny.experts[3])), nvfp4_moe::Error);
  EXPECT_THROW(layer.replace_expert(NVFP4_MOE_SHARED_EXPERT, CLayer::expert(c.tiny.experts[3])),
               nvfp4_moe::Error);
}

TEST(CApi, PlansAndExplainsWithoutWeights) {
  const CLayer c;
  size_t workspace_bytes = 0, packed_bytes = 0;
  char* text = nullptr;
  ASSERT_EQ(nvfp4_moe_plan(&c.config, &c.options, 0, 0, &text, &workspace_bytes, &packed_bytes),
            kOk);
  EXPECT_THAT(text, HasSubstr("gemm1_swiglu"));
  nvfp4_moe_text_free(text);
  EXPECT_EQ(workspace_bytes, c.open().workspace_bytes(c.options.max_tokens));
  EXPECT_GT(packed_bytes, 0u);
  EXPECT_EQ(nvfp4_moe_plan(&c.config, &c.options, 0, 0, nullptr, nullptr, nullptr), kOk);
  nvfp4_moe_config config = c.config;
  config.activation_scale = NVFP4_MOE_SCALE_STATIC;  // needs an input scale
  EXPECT_EQ(nvfp4_moe_plan(&config, &c.options, 0, 0, nullptr, nullptr, nullptr),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_plan(&config, &c.options, 0.5f, 0, nullptr, nullptr, nullptr), kOk);

  const auto choices = nlohmann::json::parse(nvfp4_moe::explain(c.config));
  ASSERT_EQ(choices.size(), backends().size());
  for (const auto& choice : choices)
    EXPECT_EQ(choice["chosen"], choice["backend"] == kCpuBackend.name) << choice;
  EXPECT_EQ(nlohmann::json::parse(nvfp4_moe::explain(c.config, "reference")).back()["chosen"],
            true);
}

TEST(CApi, DevicesAreNamed) {
  CLayer c;
  c.options.device = "cpu";
  EXPECT_EQ(c.try_open(), kOk);
  c.options.device = "gpu";
  EXPECT_EQ(c.try_open(), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  c.options.device = "cuda:999";  // no machine has a thousand
  EXPECT_EQ(c.try_open(), NVFP4_MOE_STATUS_UNSUPPORTED);
}

TEST(CApi, CheckpointsOpenRunAndTell) {
  const std::string path = std::string(NVFP4_MOE_SOURCE_DIR) + "/tests/vectors/modelopt_qwen3_moe";
  const nvfp4_moe::Checkpoint checkpoint(path);
  const auto info = nlohmann::json::parse(checkpoint.info());
  EXPECT_EQ(info["model_type"], "qwen3_moe");
  EXPECT_EQ(info["layers"], (std::vector<int>{0, 1}));
  EXPECT_TRUE(nlohmann::json::parse(checkpoint.findings()).is_array());
  EXPECT_TRUE(nlohmann::json::parse(checkpoint.findings(1)).is_array());
  EXPECT_THROW(checkpoint.findings(7), nvfp4_moe::Error);
  nvfp4_moe_config config = checkpoint.config(0);
  EXPECT_EQ(config.num_experts, 4);
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.activation_format, NVFP4_MOE_FORMAT_NVFP4);  // as declared
  config.activation_format = NVFP4_MOE_FORMAT_AUTO;             // as without a config
  EXPECT_THROW(nvfp4_moe::text_of(nvfp4_moe_explain, &config, nullptr), nvfp4_moe::Error);

  auto options = nvfp4_moe::make<nvfp4_moe_layer_options>();
  options.max_tokens = 4;
  options.threads = 1;
  const TempDir directory;
  const std::string cache = directory.file("cache");
  MoeOptions shape = tiny_options();
  TinyBatch batch(shape, 4);
  std::vector<std::vector<float>> outs;
  for (int i = 0; i < 3; ++i) {
    options.cache_directory = i == 0 ? nullptr : cache.c_str();
    const nvfp4_moe::Layer layer(checkpoint, 0, options, i == 2 ? &config : nullptr);
    const nvfp4_moe::Workspace workspace(layer.workspace_bytes(4));
    layer.run(c_batch(batch), workspace);
    outs.push_back(batch.out);
  }
  EXPECT_TRUE(same_bits(outs[0], outs[1]));
  EXPECT_TRUE(same_bits(outs[0], outs[2]));

  options.slice_first = 16;
  options.slice_count = 32;
  EXPECT_EQ(nlohmann::json::parse(
                nvfp4_moe::Layer(checkpoint, 0, options).describe())["intermediate_size"],
            32);
  options.slice_count = 48;
  EXPECT_THROW(nvfp4_moe::Layer(checkpoint, 0, options), nvfp4_moe::Error);
}

TEST(CApi, ReprosAreWrittenAndReplayed) {
  const CLayer c;
  const TempDir directory;
  const std::string path = directory.file("repro.safetensors");
  const nvfp4_moe::Layer layer = c.open();
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(16));
  TinyBatch batch(c.tiny.options, 3);
  layer.run(c_batch(batch), workspace);
  const nvfp4_moe_batch call = c_batch(batch);
  ASSERT_EQ(nvfp4_moe_layer_write_repro(layer.get(), &call, 1, path.c_str()), kOk);
  const auto report =
      nlohmann::json::parse(nvfp4_moe::text_of(nvfp4_moe_replay, path.c_str(), nullptr));
  EXPECT_EQ(report["same_bits"], true);
  EXPECT_EQ(report["passed"], true);

  batch.out[70] = 1e6f;  // a wrong output is a failed check, with its report
  ASSERT_EQ(nvfp4_moe_layer_write_repro(layer.get(), &call, 1, path.c_str()), kOk);
  char* json = nullptr;
  EXPECT_EQ(nvfp4_moe_replay(path.c_str(), nullptr, &json), NVFP4_MOE_STATUS_CHECK_FAILED);
  ASSERT_NE(json, nullptr);
  EXPECT_EQ(nlohmann::json::parse(json)["with_output"]["max_token"], 1);
  nvfp4_moe_text_free(json);
}

// cli/output_test.cpp tests which files may be written; this tests that the C interface applies
// those rules.
TEST(CApi, AReproReplacesRegularFilesOnly) {
  const CLayer c;
  const TempDir directory;
  const nvfp4_moe::Layer layer = c.open();
  TinyBatch batch(c.tiny.options, 1);
  const nvfp4_moe_batch call = c_batch(batch);
  const auto write = [&](const char* path) {
    return nvfp4_moe_layer_write_repro(layer.get(), &call, 0, path);
  };
  EXPECT_EQ(write("/dev/null"), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  const std::string link = directory.file("link"), target = directory.file("target");
  ASSERT_EQ(write(target.c_str()), kOk);
  std::filesystem::resize_file(target, 1);
  std::filesystem::create_symlink("target", link);
  EXPECT_EQ(write(link.c_str()), kOk);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_GT(std::filesystem::file_size(target), 1u);
}

TEST(CApi, LinearRuns) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(40, 96, 0.25f, random);
  auto options = nvfp4_moe::make<nvfp4_moe_linear_options>();
  options.rows = 40;
  options.cols = 96;
  options.codes = weight.codes.data();
  options.block_scales = weight.block_scales.data();
  options.tensor_scale = weight.tensor_scale;
  options.max_tokens = 2;
  options.threads = 1;
  options.activation_format = NVFP4_MOE_FORMAT_BF16;
  const nvfp4_moe::Linear linear(options);
  const std::vector<float> x(2 * 96, 1.0f);
  std::vector<float> out(2 * 40), wide(40 * 96);
  auto batch = nvfp4_moe::make<nvfp4_moe_linear_batch>();
  batch.tokens = 2;
  batch.x = x.data();
  batch.x_dtype = kF32;
  batch.out = out.data();
  linear.run(batch, nvfp4_moe::Workspace(linear.workspace_bytes(2)));
  ASSERT_OK(dequantize(weight.view(), DType::kF32, wide.data()));
  double sum = 0, sum_abs = 0;
  for (size_t k = 39 * 96; k < 40 * 96; ++k) {
    sum += wide[k];
    sum_abs += std::abs(wide[k]);
  }
  EXPECT_NEAR(out[40 + 39], sum, 96 * 0x1p-24 * sum_abs);
  EXPECT_EQ(nlohmann::json::parse(linear.describe())["cols"], 96);
  options.cols = 95;
  EXPECT_THROW(nvfp4_moe::Linear{options}, nvfp4_moe::Error);
}

}  // namespace
}  // namespace nvfp4_moe::internal
