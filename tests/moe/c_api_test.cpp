// The C interface computes the same as the library, through the C++ header, which throws its
// errors.
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "moe/c_layer.h"
#include "moe/linear.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

TEST(CApi, RunsTheSameLayer) {
  MoeOptions options = tiny_options();
  options.shared_intermediate_size = 32;
  const CLayer c(options);
  const nvfp4_moe::Layer layer = c.open();
  EXPECT_EQ(nlohmann::json::parse(layer.describe())["shared_intermediate_size"], 32);
  EXPECT_LT(layer.workspace_bytes(2), layer.workspace_bytes(16));
  for (const int64_t tokens : {2, 16}) {
    TinyBatch batch(options, tokens), larger(options, tokens + 1);
    const std::vector<float> expected = c.expected(batch);
    const nvfp4_moe::Workspace workspace(layer.workspace_bytes(tokens));
    batch.out.assign(batch.out.size(), -1.0f);
    layer.run(c_batch(batch), workspace);
    EXPECT_TRUE(same_bits(batch.out, expected));
    EXPECT_THROW(layer.run(c_batch(larger), workspace), nvfp4_moe::Error);
    const auto run = nlohmann::json::parse(layer.describe_run(tokens));
    EXPECT_EQ(run["tokens"], tokens);
    EXPECT_EQ(run["workspace_bytes"], layer.workspace_bytes(tokens));
    EXPECT_TRUE(run["steps"].contains("gemm1_swiglu"));
  }
  EXPECT_THROW(layer.workspace_bytes(-1), nvfp4_moe::Error);
  EXPECT_THROW(layer.workspace_bytes(17), nvfp4_moe::Error);
  EXPECT_THROW(layer.describe_run(17), nvfp4_moe::Error);
}

// Every count of a run is the library's.
TEST(CApi, StatusHasEveryCount) {
  MoeOptions options = tiny_options();
  options.intermediate_scale = IntermediateScale::kFixed;
  options.intermediate_fixed = 0x1p-12f;  // saturates
  CLayer c(options);
  c.config.intermediate_scale = static_cast<int32_t>(options.intermediate_scale);
  c.config.intermediate_fixed = *options.intermediate_fixed;
  const auto own = open_tiny(c.tiny);
  const Buffer own_workspace = workspace_of(*own);
  const nvfp4_moe::Layer layer = c.open();
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(16));
  TinyBatch batch(c.tiny.options, 9);
  batch.hidden[0] = 0x4F00;  // 2^31: the token's other blocks become 0
  batch.hidden[2 * 64] = 0x7FC0;
  batch.ids[3] = -1;
  batch.ids[5] = 99;
  batch.weights[3] = batch.weights[8] = std::numeric_limits<float>::quiet_NaN();
  layer.run(c_batch(batch), workspace);
  ASSERT_OK(run_in(own_workspace, *own, batch.batch()));
  const RunStatus expected = *must(own->status(own_workspace.data(), own_workspace.size_bytes()));
  const nvfp4_moe_run_status status = layer.status(workspace);
  EXPECT_EQ(status.bad_expert_ids, 1u);
  EXPECT_EQ(status.nonfinite_tokens, 1u);
  EXPECT_EQ(status.nonfinite_weights, 1u);
  EXPECT_EQ(status.nonfinite_rows, expected.nonfinite_rows);
  EXPECT_EQ(status.nonfinite_outputs, expected.nonfinite_outputs);
  EXPECT_EQ(status.hidden_blocks, expected.hidden_blocks);
  EXPECT_EQ(status.hidden_saturated, expected.hidden_saturated);
  EXPECT_EQ(status.hidden_zeroed, expected.hidden_zeroed);
  EXPECT_EQ(status.intermediate_blocks, expected.intermediate_blocks);
  EXPECT_EQ(status.intermediate_saturated, expected.intermediate_saturated);
  EXPECT_EQ(status.intermediate_zeroed, expected.intermediate_zeroed);
  EXPECT_GT(status.hidden_zeroed, 0u);
  EXPECT_GT(status.intermediate_saturated, status.intermediate_zeroed);
}

TEST(CApi, GateAndUpMayBeHalvesOfOneTensor) {
  CLayer c;
  TinyBatch batch(c.tiny.options, 9);
  const std::vector<float> expected = c.expected(batch);
  std::vector<uint8_t> codes, scales;  // (E, 2I, H/2), (E, 2I, H/16)
  for (const Expert& e : c.tiny.experts)
    for (const Matrix* m : {&e.gate, &e.up}) {
      codes.insert(codes.end(), m->codes.begin(), m->codes.end());
      scales.insert(scales.end(), m->block_scales.begin(), m->block_scales.end());
    }
  constexpr int64_t kCodes = 48 * 32, kScales = 48 * 4;
  c.tensors.gate_codes = codes.data();
  c.tensors.up_codes = codes.data() + kCodes;
  c.tensors.gate_block_scales = scales.data();
  c.tensors.up_block_scales = scales.data() + kScales;
  c.tensors.gate_up_codes_stride = 2 * kCodes;
  c.tensors.gate_up_scales_stride = 2 * kScales;
  const nvfp4_moe::Layer layer = c.open();
  layer.run(c_batch(batch), nvfp4_moe::Workspace(layer.workspace_bytes(16)));
  EXPECT_TRUE(same_bits(batch.out, expected));
  c.tensors.gate_up_codes_stride = 5;
  EXPECT_EQ(c.try_open(), kInvalid);
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
    const auto part = [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += grain) body(context, i, std::min(i + grain, end));
    };
    std::thread half(part, 0, count / 2);
    part(count / 2, count);
    half.join();
    body(context, -5, 0);  // ranges outside the loop are cut off
    body(context, count, count + 5);
  };
  const nvfp4_moe::Layer layer = c.open();
  layer.run(c_batch(batch), nvfp4_moe::Workspace(layer.workspace_bytes(16)));
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
  EXPECT_THAT(told.items, ElementsAre("expert 0", "expert 1", "expert 2", "expert 3"));
  told = {{}, 0};
  EXPECT_EQ(c.try_open(), NVFP4_MOE_STATUS_CANCELLED);
  EXPECT_EQ(told.items.size(), 1u);
}

TEST(CApi, ReplacesAndUnpacks) {
  CLayer c;
  nvfp4_moe::Layer layer = c.open();
  const nvfp4_moe_expert third = CLayer::expert(c.tiny.experts[3]);
  layer.replace_expert(1, third);
  Expert got = c.tiny.experts[0];
  auto out = nvfp4_moe::make<nvfp4_moe_expert_out>();
  out.gate_codes = got.gate.codes.data();
  out.up_block_scales = got.up.block_scales.data();
  out.down_codes = got.down.codes.data();
  out.down_block_scales = got.down.block_scales.data();  // the others are left out
  layer.unpack_expert(1, out);
  const Expert& expected = c.tiny.experts[3];
  EXPECT_EQ(got.gate.codes, expected.gate.codes);
  EXPECT_EQ(got.up.block_scales, expected.up.block_scales);
  EXPECT_EQ(got.down.codes, expected.down.codes);
  EXPECT_EQ(got.down.block_scales, expected.down.block_scales);
  EXPECT_EQ(got.up.codes, c.tiny.experts[0].up.codes);
  EXPECT_EQ(out.gate_tensor_scale, expected.gate.tensor_scale);
  EXPECT_EQ(out.up_tensor_scale, expected.up.tensor_scale);
  EXPECT_EQ(out.down_tensor_scale, expected.down.tensor_scale);
  EXPECT_THROW(layer.replace_expert(4, third), nvfp4_moe::Error);
  EXPECT_THROW(layer.replace_expert(NVFP4_MOE_SHARED_EXPERT, third), nvfp4_moe::Error);
}

TEST(CApi, PlansAndExplainsWithoutWeights) {
  EXPECT_EQ(nvfp4_moe::abi_version(), NVFP4_MOE_ABI_VERSION);
  EXPECT_EQ(nvfp4_moe::status_name(NVFP4_MOE_STATUS_OUT_OF_MEMORY), "out of memory");
  EXPECT_EQ(nvfp4_moe::status_name(-1), "unknown");
  const CLayer c;
  const nvfp4_moe::Plan plan = nvfp4_moe::plan(c.config, c.options);
  EXPECT_THAT(plan.text, HasSubstr("gemm1_swiglu"));
  EXPECT_EQ(plan.workspace_bytes, c.open().workspace_bytes(c.options.max_tokens));
  EXPECT_GT(plan.packed_bytes, 0u);
  nvfp4_moe_config config = c.config;
  config.activation_scale = NVFP4_MOE_SCALE_STATIC;  // needs an input scale
  EXPECT_EQ(nvfp4_moe_plan(&config, &c.options, 0, 0, nullptr, nullptr, nullptr), kInvalid);
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
  EXPECT_EQ(c.try_open(), kInvalid);
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

  // The same without a cache, into one, and out of it with a config.
  auto options = nvfp4_moe::make<nvfp4_moe_layer_options>();
  options.max_tokens = 4;
  options.threads = 1;
  const TempDir directory;
  const std::string cache = directory.file("cache");
  TinyBatch batch(tiny_options(), 4);
  std::vector<float> first;
  for (int i = 0; i < 3; ++i) {
    options.cache_directory = i == 0 ? nullptr : cache.c_str();
    const nvfp4_moe::Layer layer(checkpoint, 0, options, i == 2 ? &config : nullptr);
    layer.run(c_batch(batch), nvfp4_moe::Workspace(layer.workspace_bytes(4)));
    if (i == 0) first = batch.out;
    EXPECT_TRUE(same_bits(batch.out, first));
  }
  options.slice_first = 16;
  options.slice_count = 32;
  const nvfp4_moe::Layer slice(checkpoint, 0, options);
  EXPECT_EQ(nlohmann::json::parse(slice.describe())["intermediate_size"], 32);
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
  layer.write_repro(c_batch(batch), path);
  const auto report = nlohmann::json::parse(nvfp4_moe::replay(path));
  EXPECT_EQ(report["same_bits"], true);
  EXPECT_EQ(report["passed"], true);

  batch.out[70] = 1e6f;  // a wrong output is a failed check, with its report
  layer.write_repro(c_batch(batch), path);
  char* json = nullptr;
  EXPECT_EQ(nvfp4_moe_replay(path.c_str(), nullptr, &json), NVFP4_MOE_STATUS_CHECK_FAILED);
  ASSERT_NE(json, nullptr);
  EXPECT_EQ(nlohmann::json::parse(json)["with_output"]["max_token"], 1);
  nvfp4_moe_text_free(json);

  // cli/output_test.cpp tests which files may be written; the C interface applies those rules.
  EXPECT_THROW(layer.write_repro(c_batch(batch), "/dev/null"), nvfp4_moe::Error);
  const std::string link = directory.file("link");
  std::filesystem::resize_file(path, 1);
  std::filesystem::create_symlink(path, link);
  layer.write_repro(c_batch(batch), link);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_GT(std::filesystem::file_size(path), 1u);
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
  std::vector<float> out(2 * 40), expected(2 * 40);
  auto batch = nvfp4_moe::make<nvfp4_moe_linear_batch>();
  batch.tokens = 2;
  batch.x = x.data();
  batch.x_dtype = kF32;
  batch.out = out.data();
  linear.run(batch, nvfp4_moe::Workspace(linear.workspace_bytes(2)));
  const auto own = must(NvfpLinear::open(
      weight.view(), {.activation_format = ActivationFormat::kBf16, .max_tokens = 2}));
  const Buffer workspace = *allocate_pages((*own)->workspace_bytes());
  ASSERT_OK((*own)->run({2, x.data(), DType::kF32, expected.data(), DType::kF32}, workspace.data(),
                        workspace.size_bytes()));
  EXPECT_TRUE(same_bits(out, expected));
  EXPECT_EQ(nlohmann::json::parse(linear.describe())["cols"], 96);
  options.cols = 95;
  EXPECT_THROW(nvfp4_moe::Linear{options}, nvfp4_moe::Error);
}

}  // namespace
}  // namespace nvfp4_moe::internal
