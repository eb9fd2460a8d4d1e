// The C interface: what it computes is what the library computes.
// Long because it goes through the interface object by object.
#include <sys/stat.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/dequantize.h"
#include "core/quantize.h"
#include "core/scale_layout.h"
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
  c.options.parallel_for = [](int64_t count, int64_t grain, nvfp4_moe_parallel_body body, void* context, void* user) {
    ++*static_cast<int*>(user);
    std::thread half([&] {
      for (int64_t i = 0; i < count / 2; i += grain) body(context, i, std::min(i + grain, count / 2));
    });
    for (int64_t i = count / 2; i < count; i += grain) body(context, i, std::min(i + grain, count));
    half.join();
    body(context, -5, 0);  // what lies outside the loop is cut off
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
  EXPECT_EQ(c.try_open(), NVFP4_MOE_STATUS_OK);
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
  EXPECT_THROW(layer.replace_expert(NVFP4_MOE_SHARED_EXPERT, CLayer::expert(c.tiny.experts[3])), nvfp4_moe::Error);
}

TEST(CApi, PlansAndExplainsWithoutWeights) {
  const CLayer c;
  size_t workspace_bytes = 0, packed_bytes = 0;
  char* text = nullptr;
  ASSERT_EQ(nvfp4_moe_plan(&c.config, &c.options, 0, 0, &text, &workspace_bytes, &packed_bytes), NVFP4_MOE_STATUS_OK);
  EXPECT_THAT(text, HasSubstr("gemm1_swiglu"));
  nvfp4_moe_text_free(text);
  EXPECT_EQ(workspace_bytes, c.open().workspace_bytes(c.options.max_tokens));
  EXPECT_GT(packed_bytes, 0u);
  EXPECT_EQ(nvfp4_moe_plan(&c.config, &c.options, 0, 0, nullptr, nullptr, nullptr), NVFP4_MOE_STATUS_OK);
  nvfp4_moe_config config = c.config;
  config.activation_scale = NVFP4_MOE_SCALE_STATIC;  // needs an input scale
  EXPECT_EQ(nvfp4_moe_plan(&config, &c.options, 0, 0, nullptr, nullptr, nullptr), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_plan(&config, &c.options, 0.5f, 0, nullptr, nullptr, nullptr), NVFP4_MOE_STATUS_OK);

  const auto choices = nlohmann::json::parse(nvfp4_moe::explain(c.config));
  ASSERT_EQ(choices.size(), backends().size());
  for (const auto& choice : choices) EXPECT_EQ(choice["chosen"], choice["backend"] == kCpuBackend.name) << choice;
  EXPECT_EQ(nlohmann::json::parse(nvfp4_moe::explain(c.config, "reference")).back()["chosen"], true);
}

TEST(CApi, DevicesAreNamed) {
  CLayer c;
  c.options.device = "cpu";
  EXPECT_EQ(c.try_open(), NVFP4_MOE_STATUS_OK);
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
  EXPECT_EQ(nlohmann::json::parse(nvfp4_moe::Layer(checkpoint, 0, options).describe())["intermediate_size"], 32);
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
  ASSERT_EQ(nvfp4_moe_layer_write_repro(layer.get(), &call, 1, path.c_str()), NVFP4_MOE_STATUS_OK);
  const auto report = nlohmann::json::parse(nvfp4_moe::text_of(nvfp4_moe_replay, path.c_str(), nullptr));
  EXPECT_EQ(report["same_bits"], true);
  EXPECT_EQ(report["passed"], true);

  batch.out[70] = 1e6f;  // a wrong output is a failed check, with its report
  ASSERT_EQ(nvfp4_moe_layer_write_repro(layer.get(), &call, 1, path.c_str()), NVFP4_MOE_STATUS_OK);
  char* json = nullptr;
  EXPECT_EQ(nvfp4_moe_replay(path.c_str(), nullptr, &json), NVFP4_MOE_STATUS_CHECK_FAILED);
  ASSERT_NE(json, nullptr);
  EXPECT_EQ(nlohmann::json::parse(json)["with_output"]["max_token"], 1);
  nvfp4_moe_text_free(json);
}

TEST(CApi, AReproReplacesRegularFilesOnly) {
  const CLayer c;
  const TempDir directory;
  const nvfp4_moe::Layer layer = c.open();
  TinyBatch batch(c.tiny.options, 1);
  const nvfp4_moe_batch call = c_batch(batch);
  const auto write = [&](const std::string& path) {
    return nvfp4_moe_layer_write_repro(layer.get(), &call, 0, path.c_str());
  };
  const std::string fifo = directory.file("fifo"), link = directory.file("link"), target = directory.file("target");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(write(fifo), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_TRUE(std::filesystem::is_fifo(fifo));
  EXPECT_EQ(write("/dev/null"), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(write(directory.path().string()), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  ASSERT_EQ(write(target), NVFP4_MOE_STATUS_OK);
  std::filesystem::resize_file(target, 1);
  std::filesystem::create_symlink("target", link);
  EXPECT_EQ(write(link), NVFP4_MOE_STATUS_OK);
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
  const nvfp4_moe::Workspace workspace(linear.workspace_bytes(2));
  const std::vector<float> x(2 * 96, 1.0f);
  std::vector<float> out(2 * 40);
  auto batch = nvfp4_moe::make<nvfp4_moe_linear_batch>();
  batch.tokens = 2;
  batch.x = x.data();
  batch.x_dtype = NVFP4_MOE_DTYPE_F32;
  batch.out = out.data();
  linear.run(batch, workspace);
  std::vector<float> wide(40 * 96);
  ASSERT_OK(dequantize(weight.view(), DType::kF32, wide.data()));
  double sum = 0, sum_abs = 0;
  for (int k = 0; k < 96; ++k) {
    sum += wide[static_cast<size_t>(39 * 96 + k)];
    sum_abs += std::abs(wide[static_cast<size_t>(39 * 96 + k)]);
  }
  EXPECT_NEAR(out[40 + 39], sum, 96 * 0x1p-24 * sum_abs);
  EXPECT_EQ(nlohmann::json::parse(linear.describe())["cols"], 96);
  options.cols = 95;
  EXPECT_THROW(nvfp4_moe::Linear{options}, nvfp4_moe::Error);
}

TEST(CApi, FormatFunctionsAreTheLibrarys) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> x(8 * 64);
  for (auto& value : x) value = normal(random);
  std::vector<uint8_t> codes(8 * 32), scales(8 * 4);
  float tensor_scale = 0;
  auto counts = nvfp4_moe::make<nvfp4_moe_quantize_counts>();
  ASSERT_EQ(nvfp4_moe_quantize(x.data(), NVFP4_MOE_DTYPE_F32, 8, 64, NVFP4_MOE_SEARCH_MSE, &tensor_scale, codes.data(),
                               scales.data(), &counts),
            NVFP4_MOE_STATUS_OK);
  float amax = 0;
  for (const float value : x) amax = std::max(amax, std::abs(value));
  EXPECT_EQ(tensor_scale, static_cast<float>(static_cast<double>(amax) / 2688));
  EXPECT_EQ(counts.blocks, 32u);
  std::vector<uint8_t> codes2(codes.size()), scales2(scales.size());
  QuantizeCounts own;
  ASSERT_OK(quantize_weights(x, 8, 64, tensor_scale, ScaleSearch::kMse, codes2.data(), scales2.data(), own));
  EXPECT_EQ(codes, codes2);
  EXPECT_EQ(scales, scales2);

  ASSERT_EQ(nvfp4_moe_quantize(x.data(), NVFP4_MOE_DTYPE_F32, 8, 64, NVFP4_MOE_SEARCH_SWEEP, &tensor_scale,
                               codes2.data(), scales2.data(), nullptr),
            NVFP4_MOE_STATUS_OK);
  std::vector<uint8_t> codes3(codes.size()), scales3(scales.size());
  ASSERT_OK(quantize_weights(x, 8, 64, tensor_scale, ScaleSearch::kSweep, codes3.data(), scales3.data(), own));
  EXPECT_EQ(scales2, scales3);
  EXPECT_EQ(codes2, codes3);
  EXPECT_NE(scales2, scales);

  // Decoded, no element is further off than the widest gap of E2M1 (1 at scale 1, between 4 and 6) allows.
  std::vector<float> back(x.size());
  ASSERT_EQ(nvfp4_moe_dequantize(codes.data(), scales.data(), tensor_scale, 8, 64, NVFP4_MOE_DTYPE_F32, back.data()),
            NVFP4_MOE_STATUS_OK);
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_LE(std::abs(back[i] - x[i]), 2.01 * e4m3_to_float(scales[i / 16]) * tensor_scale);

  std::vector<float> row_scales(8);
  ASSERT_EQ(nvfp4_moe_quantize_dynamic_token(x.data(), NVFP4_MOE_DTYPE_F32, 8, 64, codes.data(), scales.data(),
                                             row_scales.data(), nullptr),
            NVFP4_MOE_STATUS_OK);
  for (int64_t r = 0; r < 8; ++r) {
    const std::span<const float> row(x.data() + r * 64, 64);
    EXPECT_EQ(row_scales[static_cast<size_t>(r)], dynamic_token_scale(row_amax(row)));
    quantize_row_exact(row, row_scales[static_cast<size_t>(r)], codes2.data() + r * 32, scales2.data() + r * 4, own);
  }
  EXPECT_EQ(codes, codes2);
  EXPECT_EQ(scales, scales2);

  std::vector<int8_t> int8_codes(8 * 64), int8_codes2 = int8_codes;
  std::vector<float> int8_scales(8 * 4), int8_scales2 = int8_scales;
  x[64 + 3] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_EQ(nvfp4_moe_quantize_int8_block(x.data(), NVFP4_MOE_DTYPE_F32, 8, 64, int8_codes.data(), int8_scales.data(),
                                          &counts),
            NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(counts.nonfinite_rows, 1u);
  EXPECT_EQ(counts.blocks, 7u * 4);
  for (size_t r = 0; r < 8; ++r)
    quantize_row_int8_block({x.data() + r * 64, 64}, int8_codes2.data() + r * 64, int8_scales2.data() + r * 4, own);
  EXPECT_EQ(int8_codes, int8_codes2);
  EXPECT_EQ(std::memcmp(int8_scales.data(), int8_scales2.data(), int8_scales.size() * sizeof(float)), 0);
  EXPECT_TRUE(std::isnan(int8_scales[4]) && std::isfinite(int8_scales[3]));
  float fixed = 0x1.8p-10f;  // between two powers
  ASSERT_EQ(
      nvfp4_moe_quantize_static(x.data(), NVFP4_MOE_DTYPE_F32, 8, 64, &fixed, codes.data(), scales.data(), &counts),
      NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(fixed, 0x1p-9f) << "the power of two that was used";
  EXPECT_EQ(counts.nonfinite_rows, 1u);
  EXPECT_EQ(std::count(codes.begin() + 32, codes.begin() + 64, 0), 32);
  EXPECT_EQ(
      nvfp4_moe_quantize_compat(x.data(), NVFP4_MOE_DTYPE_F32, 8, 64, 0.0013f, codes.data(), scales.data(), &counts),
      NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(counts.nonfinite_rows, 1u);
  EXPECT_EQ(
      nvfp4_moe_quantize(x.data(), NVFP4_MOE_DTYPE_F32, 8, 64, 0, &tensor_scale, codes.data(), scales.data(), nullptr),
      NVFP4_MOE_STATUS_INVALID_ARGUMENT);  // NaN in weights
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("row 1"));

  EXPECT_EQ(nvfp4_moe_fp8_scale_count(200, 256, 128, 128), 4);
  EXPECT_EQ(nvfp4_moe_fp8_scale_count(200, 256, 0, 0), 1);
  EXPECT_EQ(nvfp4_moe_fp8_scale_count(200, 256, 0, 128), -1);
  std::vector<uint8_t> fp8(8 * 64);
  float fp8_scale = 0;
  ASSERT_EQ(nvfp4_moe_convert_to_fp8(codes.data(), scales.data(), 1.0f, 8, 64, 0, 0, fp8.data(), &fp8_scale),
            NVFP4_MOE_STATUS_OK);
  EXPECT_GT(fp8_scale, 0.0f);

  std::vector<uint8_t> values(16), packed(8), again(16);
  for (size_t i = 0; i < 16; ++i) values[i] = static_cast<uint8_t>(i);
  ASSERT_EQ(nvfp4_moe_pack_codes(values.data(), 16, packed.data()), NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(packed[0], 0x10);
  ASSERT_EQ(nvfp4_moe_unpack_codes(packed.data(), 16, again.data()), NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(again, values);
  values[3] = 16;
  EXPECT_EQ(nvfp4_moe_pack_codes(values.data(), 16, packed.data()), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_pack_codes(values.data(), 15, packed.data()), NVFP4_MOE_STATUS_INVALID_ARGUMENT);

  EXPECT_EQ(nvfp4_moe_swizzled_bytes(129, 5), 256 * 8);
  EXPECT_EQ(nvfp4_moe_swizzled_bytes(-1, 5), -1);
  std::vector<uint8_t> linear(129 * 5), swizzled(256 * 8), linear2(129 * 5);
  for (auto& byte : linear) byte = static_cast<uint8_t>(random());
  ASSERT_EQ(nvfp4_moe_swizzle_scales(linear.data(), 129, 5, swizzled.data()), NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(swizzled[static_cast<size_t>(swizzled_scale_offset(77, 3, 5))], linear[77 * 5 + 3]);
  ASSERT_EQ(nvfp4_moe_unswizzle_scales(swizzled.data(), 129, 5, linear2.data()), NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(linear2, linear);
}

// The pass is its parts: the activation in fp32, bf16, then the quantizer that has its own tests.
TEST(CApi, SwigluQuantizeIsItsParts) {
  constexpr int64_t kRows = 5, kInner = 48;
  std::mt19937 random(9);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> gate_up(kRows * 2 * kInner), router(kRows);
  for (float& value : gate_up) value = normal(random);
  for (float& value : router) value = std::abs(normal(random));
  const float kInf = std::numeric_limits<float>::infinity();
  gate_up[3 * 2 * kInner + 7] = kInf;
  for (const bool interleaved : {false, true}) {
    for (const float power_of_two : {0.0f, 0x1p-7f}) {
      auto options = nvfp4_moe::make<nvfp4_moe_swiglu>();
      options.activation = NVFP4_MOE_ACTIVATION_SWIGLU_CLAMPED;
      options.swiglu_limit = 4.0f;
      options.dtype = NVFP4_MOE_DTYPE_F32;
      options.interleaved = interleaved ? 1 : 0;
      options.power_of_two = power_of_two;
      std::vector<uint8_t> codes(kRows * kInner / 2), scales(kRows * kInner / 16), codes2(kInner / 2),
          scales2(kInner / 16);
      std::vector<float> row_scales(kRows);
      auto counts = nvfp4_moe::make<nvfp4_moe_quantize_counts>();
      ASSERT_EQ(nvfp4_moe_swiglu_quantize(&options, gate_up.data(), kRows, kInner, router.data(), codes.data(),
                                          scales.data(), row_scales.data(), &counts),
                NVFP4_MOE_STATUS_OK)
          << nvfp4_moe_last_error();
      EXPECT_EQ(counts.blocks, static_cast<uint64_t>(kRows * kInner / 16));
      for (int64_t r = 0; r < kRows; ++r) {
        std::vector<float> h(kInner);
        for (int64_t i = 0; i < kInner; ++i) {
          const float* row = gate_up.data() + r * 2 * kInner;
          const float g = std::min(row[interleaved ? 2 * i : i], 4.0f);
          const float u = std::clamp(row[interleaved ? 2 * i + 1 : kInner + i], -4.0f, 4.0f);
          const float sigmoid = 1.0f / (1.0f + std::exp(-g));
          h[static_cast<size_t>(i)] = bf16_to_float(bf16_from_float(g * sigmoid * u * router[static_cast<size_t>(r)]));
        }
        const float scale = power_of_two != 0 ? power_of_two : dynamic_token_scale(row_amax(h));
        QuantizeCounts own;
        quantize_row_exact(h, scale, codes2.data(), scales2.data(), own);
        EXPECT_TRUE(std::equal(codes2.begin(), codes2.end(), codes.begin() + r * kInner / 2));
        EXPECT_TRUE(std::equal(scales2.begin(), scales2.end(), scales.begin() + r * kInner / 16));
        EXPECT_EQ(row_scales[static_cast<size_t>(r)], scale) << "a clamped infinity is finite";
      }
    }
  }
  auto plain = nvfp4_moe::make<nvfp4_moe_swiglu>();
  plain.dtype = NVFP4_MOE_DTYPE_F32;
  std::vector<uint8_t> codes(kRows * kInner / 2, 1), scales(kRows * kInner / 16, 1);
  std::vector<float> row_scales(kRows);
  ASSERT_EQ(nvfp4_moe_swiglu_quantize(&plain, gate_up.data(), kRows, kInner, nullptr, codes.data(), scales.data(),
                                      row_scales.data(), nullptr),
            NVFP4_MOE_STATUS_OK);
  EXPECT_TRUE(std::isnan(row_scales[3])) << "an infinity that nothing clamps is carried by the row's scale";
  EXPECT_EQ(std::count(codes.begin() + 3 * kInner / 2, codes.begin() + 4 * kInner / 2, 0), kInner / 2);
}

}  // namespace
}  // namespace nvfp4_moe::internal
