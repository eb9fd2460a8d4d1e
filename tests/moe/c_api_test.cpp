// The C interface: what it computes is what the library computes, and no misuse gets further than a code and a text.
#include <nlohmann/json.hpp>
#include <thread>

#include "core/dequantize.h"
#include "core/quantize.h"
#include "core/scale_layout.h"
#include "moe/tiny.h"
#include "nvfp4_moe/nvfp4_moe.hpp"

namespace nvfp4_moe {
namespace {

using namespace test;
using testing::HasSubstr;

// The tiny layer as C structs.
struct CLayer {
  TinyLayer tiny;
  std::vector<uint8_t> arrays[6];  // (E, ...) gate, up, down: codes, block scales
  std::vector<float> scales[3];    // (E)
  nvfp4_moe_expert shared = api::make<nvfp4_moe_expert>();
  nvfp4_moe_config config = api::make<nvfp4_moe_config>();
  nvfp4_moe_layer_tensors tensors = api::make<nvfp4_moe_layer_tensors>();
  nvfp4_moe_layer_options options = api::make<nvfp4_moe_layer_options>();

  static nvfp4_moe_expert expert(const Expert& e) {
    auto c = api::make<nvfp4_moe_expert>();
    c.gate_codes = e.gate.codes.data();
    c.gate_block_scales = e.gate.block_scales.data();
    c.gate_tensor_scale = e.gate.tensor_scale;
    c.up_codes = e.up.codes.data();
    c.up_block_scales = e.up.block_scales.data();
    c.up_tensor_scale = e.up.tensor_scale;
    c.down_codes = e.down.codes.data();
    c.down_block_scales = e.down.block_scales.data();
    c.down_tensor_scale = e.down.tensor_scale;
    return c;
  }

  explicit CLayer(const MoeOptions& layer_options = tiny_options()) : tiny(layer_options) {
    for (const Expert& e : tiny.experts) {
      int i = 0;
      for (const Matrix* m : {&e.gate, &e.up, &e.down}) {
        arrays[2 * i].insert(arrays[2 * i].end(), m->codes.begin(), m->codes.end());
        arrays[2 * i + 1].insert(arrays[2 * i + 1].end(), m->block_scales.begin(), m->block_scales.end());
        scales[i++].push_back(m->tensor_scale);
      }
    }
    const MoeOptions& o = tiny.options;
    config.num_experts = o.num_experts;
    config.top_k = o.top_k;
    config.hidden_size = o.hidden_size;
    config.intermediate_size = o.intermediate_size;
    config.shared_intermediate_size = o.shared_intermediate_size;
    tensors.gate_codes = arrays[0].data();
    tensors.gate_block_scales = arrays[1].data();
    tensors.gate_tensor_scales = scales[0].data();
    tensors.up_codes = arrays[2].data();
    tensors.up_block_scales = arrays[3].data();
    tensors.up_tensor_scales = scales[1].data();
    tensors.down_codes = arrays[4].data();
    tensors.down_block_scales = arrays[5].data();
    tensors.down_tensor_scales = scales[2].data();
    if (!tiny.shared.empty()) {
      shared = expert(tiny.shared[0]);
      tensors.shared = &shared;
    }
    options.max_tokens = 16;
    options.threads = 1;
  }
  api::Layer open() const { return api::Layer(config, tensors, options); }
  nvfp4_moe_code try_open() const {
    nvfp4_moe_layer* layer = reinterpret_cast<nvfp4_moe_layer*>(1);
    const nvfp4_moe_code code = nvfp4_moe_layer_open_tensors(&config, &tensors, &options, &layer);
    EXPECT_EQ(layer == nullptr, code != NVFP4_MOE_OK);
    nvfp4_moe_layer_close(layer);
    return code;
  }
  std::vector<float> expected(TinyBatch& batch) const {
    LayerOptions layer_options = tiny_layer_options();
    return run_tiny(*MoeLayer::open(tiny.config(), tiny.source(), layer_options).value(), batch);
  }
};

nvfp4_moe_batch c_batch(TinyBatch& batch) {
  auto c = api::make<nvfp4_moe_batch>();
  c.tokens = batch.tokens;
  c.hidden = batch.hidden.data();
  c.topk_ids = batch.ids.data();
  c.topk_weights = batch.weights.data();
  c.out = batch.out.data();
  c.out_dtype = NVFP4_MOE_F32;
  return c;
}

TEST(CApi, RunsTheSameLayer) {
  MoeOptions options = tiny_options();
  options.shared_intermediate_size = 32;
  const CLayer c(options);
  TinyBatch batch(options, 9);
  const std::vector<float> expected = c.expected(batch);
  const api::Layer layer = c.open();
  const api::Workspace workspace(layer.workspace_bytes());
  batch.out.assign(batch.out.size(), -1.0f);
  layer.run(c_batch(batch), workspace);
  EXPECT_TRUE(same_bits(batch.out, expected));
  EXPECT_EQ(layer.status(workspace).bad_expert_ids, 0u);
  EXPECT_GT(layer.status(workspace).hidden_blocks, 0u);
  EXPECT_EQ(nlohmann::json::parse(layer.describe())["shared_intermediate_size"], 32);
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
  const api::Layer layer = c.open();
  const api::Workspace workspace(layer.workspace_bytes());
  layer.run(c_batch(batch), workspace);
  EXPECT_TRUE(same_bits(batch.out, expected));
  c.tensors.gate_up_codes_stride = 5;
  EXPECT_EQ(c.try_open(), NVFP4_MOE_INVALID_ARGUMENT);
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
  const api::Layer layer = c.open();
  const api::Workspace workspace(layer.workspace_bytes());
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
  EXPECT_EQ(c.try_open(), NVFP4_MOE_OK);
  EXPECT_EQ(told.items.size(), 4u);
  EXPECT_EQ(told.items[2], "expert 2");
  told = {{}, 0};
  EXPECT_EQ(c.try_open(), NVFP4_MOE_CANCELLED);
  EXPECT_EQ(told.items.size(), 1u);
}

TEST(CApi, ReplacesAndUnpacks) {
  CLayer c;
  api::Layer layer = c.open();
  layer.replace_expert(1, CLayer::expert(c.tiny.experts[3]));
  Expert got = c.tiny.experts[0];
  auto out = api::make<nvfp4_moe_expert_out>();
  out.gate_codes = got.gate.codes.data();
  out.up_block_scales = got.up.block_scales.data();
  out.down_codes = got.down.codes.data();  // the others are left out
  layer.unpack_expert(1, out);
  EXPECT_EQ(got.gate.codes, c.tiny.experts[3].gate.codes);
  EXPECT_EQ(got.up.block_scales, c.tiny.experts[3].up.block_scales);
  EXPECT_EQ(got.down.codes, c.tiny.experts[3].down.codes);
  EXPECT_EQ(got.up.codes, c.tiny.experts[0].up.codes);
  EXPECT_EQ(out.down_tensor_scale, c.tiny.experts[3].down.tensor_scale);
  EXPECT_THROW(layer.replace_expert(4, CLayer::expert(c.tiny.experts[3])), api::Error);
  EXPECT_THROW(layer.replace_expert(NVFP4_MOE_SHARED_EXPERT, CLayer::expert(c.tiny.experts[3])), api::Error);
}

TEST(CApi, PlansAndExplainsWithoutWeights) {
  const CLayer c;
  size_t workspace_bytes = 0, packed_bytes = 0;
  char* text = nullptr;
  ASSERT_EQ(nvfp4_moe_plan(&c.config, &c.options, 0, 0, &text, &workspace_bytes, &packed_bytes), NVFP4_MOE_OK);
  EXPECT_THAT(text, HasSubstr("gemm1_swiglu"));
  nvfp4_moe_text_free(text);
  EXPECT_EQ(workspace_bytes, c.open().workspace_bytes());
  EXPECT_GT(packed_bytes, 0u);
  EXPECT_EQ(nvfp4_moe_plan(&c.config, &c.options, 0, 0, nullptr, nullptr, nullptr), NVFP4_MOE_OK);
  nvfp4_moe_config config = c.config;
  config.activation_scale = NVFP4_MOE_SCALE_STATIC;  // needs an input scale
  EXPECT_EQ(nvfp4_moe_plan(&config, &c.options, 0, 0, nullptr, nullptr, nullptr), NVFP4_MOE_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_plan(&config, &c.options, 0.5f, 0, nullptr, nullptr, nullptr), NVFP4_MOE_OK);

  const auto choices = nlohmann::json::parse(api::explain(c.config));
  ASSERT_EQ(choices.size(), backends().size());
  EXPECT_EQ(choices[0]["chosen"], true);
  EXPECT_EQ(nlohmann::json::parse(api::explain(c.config, "reference")).back()["chosen"], true);
}

TEST(CApi, CheckpointsOpenRunAndTell) {
  const std::string path = std::string(NVFP4_MOE_SOURCE_DIR) + "/tests/vectors/modelopt_qwen3_moe";
  const api::Checkpoint checkpoint(path);
  const auto info = nlohmann::json::parse(checkpoint.info());
  EXPECT_EQ(info["model_type"], "qwen3_moe");
  EXPECT_EQ(info["layers"], (std::vector<int>{0, 1}));
  EXPECT_TRUE(nlohmann::json::parse(checkpoint.findings()).is_array());
  EXPECT_TRUE(nlohmann::json::parse(checkpoint.findings(1)).is_array());
  EXPECT_THROW(checkpoint.findings(7), api::Error);
  nvfp4_moe_config config = checkpoint.config(0);
  EXPECT_EQ(config.num_experts, 4);
  EXPECT_EQ(config.hidden_size, 64);

  auto options = api::make<nvfp4_moe_layer_options>();
  options.max_tokens = 4;
  options.threads = 1;
  const TempDir directory;
  const std::string cache = directory.file("cache");
  MoeOptions shape = tiny_options();
  TinyBatch batch(shape, 4);
  std::vector<std::vector<float>> outs;
  for (int i = 0; i < 3; ++i) {
    options.cache_directory = i == 0 ? nullptr : cache.c_str();
    const api::Layer layer(checkpoint, 0, options, i == 2 ? &config : nullptr);
    const api::Workspace workspace(layer.workspace_bytes());
    layer.run(c_batch(batch), workspace);
    outs.push_back(batch.out);
  }
  EXPECT_TRUE(same_bits(outs[0], outs[1]));
  EXPECT_TRUE(same_bits(outs[0], outs[2]));

  options.slice_first = 16;
  options.slice_count = 32;
  EXPECT_EQ(nlohmann::json::parse(api::Layer(checkpoint, 0, options).describe())["intermediate_size"], 32);
  options.slice_count = 48;
  EXPECT_THROW(api::Layer(checkpoint, 0, options), api::Error);
}

TEST(CApi, ReprosAreWrittenAndReplayed) {
  const CLayer c;
  const TempDir directory;
  const std::string path = directory.file("repro.safetensors");
  const api::Layer layer = c.open();
  const api::Workspace workspace(layer.workspace_bytes());
  TinyBatch batch(c.tiny.options, 3);
  layer.run(c_batch(batch), workspace);
  const nvfp4_moe_batch call = c_batch(batch);
  ASSERT_EQ(nvfp4_moe_layer_write_repro(layer.get(), &call, 1, path.c_str()), NVFP4_MOE_OK);
  const auto report = nlohmann::json::parse(api::text_of(nvfp4_moe_replay, path.c_str(), nullptr));
  EXPECT_EQ(report["same_bits"], true);
  EXPECT_EQ(report["passed"], true);

  batch.out[70] = 1e6f;  // a wrong output is a failed check, with its report
  ASSERT_EQ(nvfp4_moe_layer_write_repro(layer.get(), &call, 1, path.c_str()), NVFP4_MOE_OK);
  char* json = nullptr;
  EXPECT_EQ(nvfp4_moe_replay(path.c_str(), nullptr, &json), NVFP4_MOE_CHECK_FAILED);
  ASSERT_NE(json, nullptr);
  EXPECT_EQ(nlohmann::json::parse(json)["with_output"]["max_token"], 1);
  nvfp4_moe_text_free(json);
}

TEST(CApi, LinearRuns) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(40, 96, 0.25f, random);
  auto options = api::make<nvfp4_moe_linear_options>();
  options.rows = 40;
  options.cols = 96;
  options.codes = weight.codes.data();
  options.block_scales = weight.block_scales.data();
  options.tensor_scale = weight.tensor_scale;
  options.max_tokens = 2;
  options.threads = 1;
  options.activation_format = NVFP4_MOE_ACTIVATIONS_BF16;
  const api::Linear linear(options);
  const api::Workspace workspace(linear.workspace_bytes());
  const std::vector<float> x(2 * 96, 1.0f);
  std::vector<float> out(2 * 40);
  auto batch = api::make<nvfp4_moe_linear_batch>();
  batch.tokens = 2;
  batch.x = x.data();
  batch.x_dtype = NVFP4_MOE_F32;
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
  EXPECT_THROW(api::Linear{options}, api::Error);
}

TEST(CApi, FormatFunctionsAreTheLibrarys) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> x(8 * 64);
  for (auto& value : x) value = normal(random);
  std::vector<uint8_t> codes(8 * 32), scales(8 * 4);
  float tensor_scale = 0;
  auto counts = api::make<nvfp4_moe_quantize_counts>();
  ASSERT_EQ(nvfp4_moe_quantize(x.data(), NVFP4_MOE_F32, 8, 64, NVFP4_MOE_SEARCH_MSE, &tensor_scale, codes.data(),
                               scales.data(), &counts),
            NVFP4_MOE_OK);
  float amax = 0;
  for (const float value : x) amax = std::max(amax, std::abs(value));
  EXPECT_EQ(tensor_scale, static_cast<float>(static_cast<double>(amax) / 2688));
  EXPECT_EQ(counts.blocks, 32u);
  std::vector<uint8_t> codes2(codes.size()), scales2(scales.size());
  QuantizeCounts own;
  ASSERT_OK(quantize_weights(x, 8, 64, tensor_scale, ScaleSearch::kMse, codes2.data(), scales2.data(), own));
  EXPECT_EQ(codes, codes2);
  EXPECT_EQ(scales, scales2);

  // Decoded, no element is further off than the widest gap of E2M1 (1 at scale 1, between 4 and 6) allows.
  std::vector<float> back(x.size());
  ASSERT_EQ(nvfp4_moe_dequantize(codes.data(), scales.data(), tensor_scale, 8, 64, NVFP4_MOE_F32, back.data()),
            NVFP4_MOE_OK);
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_LE(std::abs(back[i] - x[i]), 2.01 * e4m3_to_float(scales[i / 16]) * tensor_scale);

  std::vector<float> row_scales(8);
  ASSERT_EQ(nvfp4_moe_quantize_dynamic_token(x.data(), NVFP4_MOE_F32, 8, 64, codes.data(), scales.data(),
                                             row_scales.data(), nullptr),
            NVFP4_MOE_OK);
  for (int64_t r = 0; r < 8; ++r) {
    const std::span<const float> row(x.data() + r * 64, 64);
    EXPECT_EQ(row_scales[static_cast<size_t>(r)], dynamic_token_scale(row_amax(row)));
    quantize_row_exact(row, row_scales[static_cast<size_t>(r)], codes2.data() + r * 32, scales2.data() + r * 4, own);
  }
  EXPECT_EQ(codes, codes2);
  EXPECT_EQ(scales, scales2);

  x[64 + 3] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_EQ(nvfp4_moe_quantize_given(x.data(), NVFP4_MOE_F32, 8, 64, 0x1p-9f, codes.data(), scales.data(), &counts),
            NVFP4_MOE_OK);
  EXPECT_EQ(counts.nonfinite_rows, 1u);
  EXPECT_EQ(std::count(codes.begin() + 32, codes.begin() + 64, 0), 32);
  EXPECT_EQ(nvfp4_moe_quantize_compat(x.data(), NVFP4_MOE_F32, 8, 64, 0.0013f, codes.data(), scales.data(), &counts),
            NVFP4_MOE_OK);
  EXPECT_EQ(counts.nonfinite_rows, 1u);
  EXPECT_EQ(nvfp4_moe_quantize(x.data(), NVFP4_MOE_F32, 8, 64, 0, &tensor_scale, codes.data(), scales.data(), nullptr),
            NVFP4_MOE_INVALID_ARGUMENT);  // NaN in weights
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("row 1"));

  EXPECT_EQ(nvfp4_moe_fp8_scale_count(200, 256, 128, 128), 4);
  EXPECT_EQ(nvfp4_moe_fp8_scale_count(200, 256, 0, 0), 1);
  EXPECT_EQ(nvfp4_moe_fp8_scale_count(200, 256, 0, 128), -1);
  std::vector<uint8_t> fp8(8 * 64);
  float fp8_scale = 0;
  ASSERT_EQ(nvfp4_moe_convert_to_fp8(codes.data(), scales.data(), 1.0f, 8, 64, 0, 0, fp8.data(), &fp8_scale),
            NVFP4_MOE_OK);
  EXPECT_GT(fp8_scale, 0.0f);

  std::vector<uint8_t> values(16), packed(8), again(16);
  for (size_t i = 0; i < 16; ++i) values[i] = static_cast<uint8_t>(i);
  ASSERT_EQ(nvfp4_moe_pack_codes(values.data(), 16, packed.data()), NVFP4_MOE_OK);
  EXPECT_EQ(packed[0], 0x10);
  ASSERT_EQ(nvfp4_moe_unpack_codes(packed.data(), 16, again.data()), NVFP4_MOE_OK);
  EXPECT_EQ(again, values);
  values[3] = 16;
  EXPECT_EQ(nvfp4_moe_pack_codes(values.data(), 16, packed.data()), NVFP4_MOE_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_pack_codes(values.data(), 15, packed.data()), NVFP4_MOE_INVALID_ARGUMENT);

  EXPECT_EQ(nvfp4_moe_swizzled_bytes(129, 5), 256 * 8);
  EXPECT_EQ(nvfp4_moe_swizzled_bytes(-1, 5), -1);
  std::vector<uint8_t> linear(129 * 5), swizzled(256 * 8), linear2(129 * 5);
  for (auto& byte : linear) byte = static_cast<uint8_t>(random());
  ASSERT_EQ(nvfp4_moe_swizzle_scales(linear.data(), 129, 5, swizzled.data()), NVFP4_MOE_OK);
  EXPECT_EQ(swizzled[static_cast<size_t>(swizzled_scale_offset(77, 3, 5))], linear[77 * 5 + 3]);
  ASSERT_EQ(nvfp4_moe_unswizzle_scales(swizzled.data(), 129, 5, linear2.data()), NVFP4_MOE_OK);
  EXPECT_EQ(linear2, linear);
}

// ---- misuse

TEST(CApiMisuse, StructsGrowAtTheirEnd) {
  const CLayer c;
  // A caller with an older, shorter header: without the last field.
  CLayer older;
  older.config.struct_size = offsetof(nvfp4_moe_config, batch_invariant);
  older.config.batch_invariant = 77;  // not read
  EXPECT_EQ(older.try_open(), NVFP4_MOE_OK) << nvfp4_moe_last_error();
  // And with a newer, longer one: fine as long as what is unknown is zero.
  struct Newer {
    nvfp4_moe_config config;
    int64_t later = 0;
  } newer{c.config};
  newer.config.struct_size = sizeof(Newer);
  nvfp4_moe_layer* layer = nullptr;
  EXPECT_EQ(nvfp4_moe_layer_open_tensors(&newer.config, &c.tensors, &c.options, &layer), NVFP4_MOE_OK);
  nvfp4_moe_layer_close(layer);
  newer.later = 1;
  EXPECT_EQ(nvfp4_moe_layer_open_tensors(&newer.config, &c.tensors, &c.options, &layer), NVFP4_MOE_UNSUPPORTED);
  EXPECT_EQ(layer, nullptr);

  const api::Layer open = c.open();
  const api::Workspace workspace(open.workspace_bytes());
  TinyBatch batch(c.tiny.options, 4);
  open.run(c_batch(batch), workspace);
  struct NewerStatus {
    nvfp4_moe_run_status status;
    uint64_t later = 5;
  } status{};
  status.status.struct_size = sizeof(status);
  EXPECT_EQ(nvfp4_moe_layer_run_status(open.get(), workspace.data(), workspace.size_bytes(), &status.status),
            NVFP4_MOE_OK);
  EXPECT_EQ(status.later, 0u);
  status.status.hidden_blocks = 999;
  status.status.struct_size = offsetof(nvfp4_moe_run_status, hidden_blocks);
  EXPECT_EQ(nvfp4_moe_layer_run_status(open.get(), workspace.data(), workspace.size_bytes(), &status.status),
            NVFP4_MOE_OK);
  EXPECT_EQ(status.status.hidden_blocks, 999u);  // past the struct that the caller knows
}

TEST(CApiMisuse, OpeningRefuses) {
  struct Case {
    const char* text;
    std::function<void(CLayer&)> misuse;
    nvfp4_moe_code code = NVFP4_MOE_INVALID_ARGUMENT;
  };
  const Case cases[] = {
      {"config.struct_size", [](CLayer& c) { c.config.struct_size = 0; }},
      {"config.struct_size", [](CLayer& c) { c.config.struct_size = SIZE_MAX; }},
      {"tensors.struct_size", [](CLayer& c) { c.tensors.struct_size = 1; }},
      {"options.struct_size", [](CLayer& c) { c.options.struct_size = 7; }},
      {"activation: expected 0 to 3, got 4", [](CLayer& c) { c.config.activation = 4; }},
      {"activation: expected 0 to 3, got -1", [](CLayer& c) { c.config.activation = -1; }},
      {"activation_format: expected 0 to 1", [](CLayer& c) { c.config.activation_format = 2; }},
      {"activation_scale: expected 0 to 2", [](CLayer& c) { c.config.activation_scale = 3; }},
      {"intermediate_scale: expected 0 to 2", [](CLayer& c) { c.config.intermediate_scale = 99; }},
      {"router_weight: expected 0 to 1", [](CLayer& c) { c.config.router_weight = 2; }},
      {"row_format: expected 0 to 1", [](CLayer& c) { c.config.row_format = INT32_MIN; }},
      {"batch_invariant: expected 0 or 1", [](CLayer& c) { c.config.batch_invariant = 2; }},
      {"swiglu_limit", [](CLayer& c) { c.config.activation = NVFP4_MOE_SWIGLU_CLAMPED; }},
      {"swiglu_limit", [](CLayer& c) { c.config.swiglu_limit = 3; }},
      {"swiglu_limit", [](CLayer& c) { c.config.activation = 1, c.config.swiglu_limit = NAN; }},
      {"static_headroom", [](CLayer& c) { c.config.static_headroom = 3; }},
      {"hidden_size", [](CLayer& c) { c.config.hidden_size = 65; }},
      {"hidden_size", [](CLayer& c) { c.config.hidden_size = 0; }},
      {"hidden_size", [](CLayer& c) { c.config.hidden_size = INT64_MIN; }},
      {"", [](CLayer& c) { c.config.hidden_size = int64_t{1} << 60; }},
      {"", [](CLayer& c) { c.config.num_experts = INT64_MAX; }},
      {"top_k", [](CLayer& c) { c.config.top_k = 0; }},
      {"intermediate_size", [](CLayer& c) { c.config.intermediate_size = -16; }},
      {"shared", [](CLayer& c) { c.config.shared_intermediate_size = 16; }},
      {"max_tokens", [](CLayer& c) { c.options.max_tokens = 0; }},
      {"max_tokens", [](CLayer& c) { c.options.max_tokens = INT64_MAX; }},
      {"threads", [](CLayer& c) { c.options.threads = -1; }},
      {"expert range", [](CLayer& c) { c.options.first_expert = 4, c.options.expert_count = 1; }},
      {"backend: expected one of", [](CLayer& c) { c.options.backend = "warp"; }},
      {"cache_directory", [](CLayer& c) { c.options.cache_directory = "/tmp"; }},
      {"slice", [](CLayer& c) { c.options.slice_count = 16; }},
      {"cache_checksum", [](CLayer& c) { c.options.cache_checksum = 2; }},
      {"gate_codes: expected a pointer", [](CLayer& c) { c.tensors.gate_codes = nullptr; }},
      {"up_block_scales: expected a pointer", [](CLayer& c) { c.tensors.up_block_scales = nullptr; }},
      {"down_tensor_scales: expected a pointer", [](CLayer& c) { c.tensors.down_tensor_scales = nullptr; }},
      {"hidden_scale", [](CLayer& c) { c.tensors.hidden_scale = -1; }},
      {"intermediate_scale", [](CLayer& c) { c.tensors.intermediate_scale = NAN; }},
      {"tensors.shared: expected null", [](CLayer& c) { c.tensors.shared = &c.shared; }},
      {"expert 1: up tensor scale", [](CLayer& c) { c.scales[1][1] = INFINITY; }, NVFP4_MOE_BAD_INPUT},
      {"expert 0: down block scale", [](CLayer& c) { c.arrays[5][0] = 0xFF; }, NVFP4_MOE_BAD_INPUT},
  };
  for (const Case& misuse : cases) {
    CLayer c;
    misuse.misuse(c);
    EXPECT_EQ(c.try_open(), misuse.code) << misuse.text;
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(misuse.text));
  }
  const CLayer c;
  nvfp4_moe_layer* layer = nullptr;
  EXPECT_EQ(nvfp4_moe_layer_open_tensors(nullptr, &c.tensors, &c.options, &layer), NVFP4_MOE_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_layer_open_tensors(&c.config, nullptr, &c.options, &layer), NVFP4_MOE_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_layer_open_tensors(&c.config, &c.tensors, nullptr, &layer), NVFP4_MOE_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_layer_open_tensors(&c.config, &c.tensors, &c.options, nullptr), NVFP4_MOE_INVALID_ARGUMENT);
}

TEST(CApiMisuse, RunningRefuses) {
  const CLayer c;
  const api::Layer layer = c.open();
  const api::Workspace workspace(layer.workspace_bytes());
  TinyBatch batch(c.tiny.options, 4);
  struct Case {
    const char* text;
    std::function<void(nvfp4_moe_batch&)> misuse;
  };
  const Case cases[] = {
      {"batch.struct_size", [](nvfp4_moe_batch& b) { b.struct_size = 3; }},
      {"batch.reserved", [](nvfp4_moe_batch& b) { b.reserved = 1; }},
      {"tokens", [](nvfp4_moe_batch& b) { b.tokens = 17; }},
      {"tokens", [](nvfp4_moe_batch& b) { b.tokens = INT64_MIN; }},
      {"hidden_dtype: expected 0 to 5", [](nvfp4_moe_batch& b) { b.hidden_dtype = 6; }},
      {"hidden dtype", [](nvfp4_moe_batch& b) { b.hidden_dtype = NVFP4_MOE_I32; }},
      {"topk_ids dtype", [](nvfp4_moe_batch& b) { b.ids_dtype = NVFP4_MOE_F32; }},
      {"out_dtype", [](nvfp4_moe_batch& b) { b.out_dtype = -1; }},
      {"hidden: expected a pointer", [](nvfp4_moe_batch& b) { b.hidden = nullptr; }},
      {"out: expected a pointer", [](nvfp4_moe_batch& b) { b.out = nullptr; }},
      {"out: expected memory of its own", [](nvfp4_moe_batch& b) { b.out = const_cast<float*>(b.topk_weights); }},
      {"shared_weights", [](nvfp4_moe_batch& b) { b.shared_weights = b.topk_weights; }},
  };
  for (const Case& misuse : cases) {
    nvfp4_moe_batch call = c_batch(batch);
    misuse.misuse(call);
    EXPECT_EQ(nvfp4_moe_layer_run(layer.get(), &call, workspace.data(), workspace.size_bytes(), nullptr),
              NVFP4_MOE_INVALID_ARGUMENT)
        << misuse.text;
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(misuse.text));
  }
  const nvfp4_moe_batch good = c_batch(batch);
  EXPECT_EQ(nvfp4_moe_layer_run(nullptr, &good, workspace.data(), workspace.size_bytes(), nullptr),
            NVFP4_MOE_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_layer_run(layer.get(), nullptr, workspace.data(), workspace.size_bytes(), nullptr),
            NVFP4_MOE_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_layer_run(layer.get(), &good, nullptr, 0, nullptr), NVFP4_MOE_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_layer_run(layer.get(), &good, workspace.data(), 10, nullptr), NVFP4_MOE_INVALID_ARGUMENT);
  for (const float value : batch.out) EXPECT_EQ(value, -77.0f);
}

TEST(CApiMisuse, NullsAndNonsenseElsewhere) {
  char* text = nullptr;
  nvfp4_moe_checkpoint* checkpoint = nullptr;
  size_t bytes = 0;
  uint8_t byte = 0;
  float scale = 0;
  const float x[16] = {};
  const nvfp4_moe_code invalid = NVFP4_MOE_INVALID_ARGUMENT;
  EXPECT_EQ(nvfp4_moe_checkpoint_open(nullptr, &checkpoint), invalid);
  EXPECT_EQ(nvfp4_moe_checkpoint_open("/", nullptr), invalid);
  EXPECT_NE(nvfp4_moe_checkpoint_open("/no/such/model", &checkpoint), NVFP4_MOE_OK);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("/no/such/model"));
  EXPECT_EQ(checkpoint, nullptr);
  EXPECT_EQ(nvfp4_moe_checkpoint_info(nullptr, &text), invalid);
  EXPECT_EQ(nvfp4_moe_checkpoint_findings(nullptr, -1, &text), invalid);
  EXPECT_EQ(nvfp4_moe_checkpoint_config(nullptr, 0, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_layer_open_checkpoint(nullptr, 0, nullptr, nullptr, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_layer_describe(nullptr, &text), invalid);
  EXPECT_EQ(nvfp4_moe_layer_workspace_bytes(nullptr, &bytes), invalid);
  EXPECT_EQ(nvfp4_moe_layer_run_status(nullptr, nullptr, 0, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_layer_replace_expert(nullptr, 0, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_layer_unpack_expert(nullptr, 0, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_layer_write_repro(nullptr, nullptr, 0, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_replay(nullptr, nullptr, &text), invalid);
  EXPECT_EQ(nvfp4_moe_replay("/no/such/file", nullptr, nullptr), invalid);
  EXPECT_NE(nvfp4_moe_replay("/no/such/file", nullptr, &text), NVFP4_MOE_OK);
  EXPECT_EQ(nvfp4_moe_explain(nullptr, nullptr, &text), invalid);
  EXPECT_EQ(nvfp4_moe_plan(nullptr, nullptr, 0, 0, &text, nullptr, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_linear_open(nullptr, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_linear_describe(nullptr, &text), invalid);
  EXPECT_EQ(nvfp4_moe_linear_workspace_bytes(nullptr, &bytes), invalid);
  EXPECT_EQ(nvfp4_moe_linear_run(nullptr, nullptr, nullptr, 0, nullptr), invalid);
  EXPECT_EQ(text, nullptr);
  nvfp4_moe_checkpoint_close(nullptr);
  nvfp4_moe_layer_close(nullptr);
  nvfp4_moe_linear_close(nullptr);
  nvfp4_moe_text_free(nullptr);

  EXPECT_EQ(nvfp4_moe_quantize(nullptr, 0, 1, 16, 0, &scale, &byte, &byte, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_quantize(x, NVFP4_MOE_F32, -1, 16, 0, &scale, &byte, &byte, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_quantize(x, NVFP4_MOE_F32, 1, 17, 0, &scale, &byte, &byte, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_quantize(x, NVFP4_MOE_F32, INT64_MAX, 16, 0, &scale, &byte, &byte, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_quantize(x, NVFP4_MOE_I32, 1, 16, 0, &scale, &byte, &byte, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_quantize(x, NVFP4_MOE_F32, 1, 16, 2, &scale, &byte, &byte, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_quantize(x, NVFP4_MOE_F32, 1, 16, 0, nullptr, &byte, &byte, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_quantize(x, NVFP4_MOE_F32, 1, 16, 0, &scale, nullptr, &byte, nullptr), invalid);
  scale = -1;
  uint8_t codes[8], scales[1];
  EXPECT_EQ(nvfp4_moe_quantize(x, NVFP4_MOE_F32, 1, 16, 0, &scale, codes, scales, nullptr), invalid);
  nvfp4_moe_quantize_counts counts{};  // struct_size 0
  scale = 0;
  EXPECT_EQ(nvfp4_moe_quantize(x, NVFP4_MOE_F32, 1, 16, 0, &scale, codes, scales, &counts), invalid);
  EXPECT_EQ(nvfp4_moe_quantize_dynamic_token(x, NVFP4_MOE_F32, 1, 16, codes, scales, nullptr, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_quantize_given(x, NVFP4_MOE_F32, 1, 16, 3.0f, codes, scales, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_quantize_given(x, NVFP4_MOE_F32, 1, 16, NAN, codes, scales, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_quantize_compat(x, NVFP4_MOE_F32, 1, 16, 0.0f, codes, scales, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_dequantize(codes, scales, 1, 1, 16, 9, &scale), invalid);
  EXPECT_EQ(nvfp4_moe_dequantize(codes, scales, 1, 1, 16, NVFP4_MOE_F32, nullptr), invalid);
  EXPECT_EQ(nvfp4_moe_convert_to_fp8(codes, scales, 1, 1, 16, -1, 3, codes, &scale), invalid);
  EXPECT_EQ(nvfp4_moe_pack_codes(nullptr, 2, codes), invalid);
  EXPECT_EQ(nvfp4_moe_unpack_codes(codes, -2, codes), invalid);
  EXPECT_EQ(nvfp4_moe_swizzle_scales(codes, -1, 1, codes), invalid);
  EXPECT_EQ(nvfp4_moe_unswizzle_scales(nullptr, 1, 1, codes), invalid);

  EXPECT_EQ(nvfp4_moe_quantize(nullptr, 0, 0, 16, 0, &scale, nullptr, nullptr, nullptr), NVFP4_MOE_OK);  // no rows
  EXPECT_EQ(nvfp4_moe_swizzle_scales(nullptr, 0, 4, nullptr), NVFP4_MOE_OK);
}

TEST(CApiMisuse, ErrorsBelongToTheirThread) {
  EXPECT_NE(nvfp4_moe_checkpoint_open("/no/such/first", nullptr), NVFP4_MOE_OK);
  const std::string mine = nvfp4_moe_last_error();
  std::string others_before, others_after;
  std::thread([&] {
    others_before = nvfp4_moe_last_error();
    nvfp4_moe_checkpoint* checkpoint = nullptr;
    EXPECT_NE(nvfp4_moe_checkpoint_open("/no/such/second", &checkpoint), NVFP4_MOE_OK);
    others_after = nvfp4_moe_last_error();
  }).join();
  EXPECT_EQ(others_before, "");
  EXPECT_THAT(others_after, HasSubstr("/no/such/second"));
  EXPECT_EQ(mine, nvfp4_moe_last_error());
}

TEST(CApi, NamesAndVersions) {
  EXPECT_EQ(api::version(), "0.1.0");
  EXPECT_EQ(nvfp4_moe_abi_version(), NVFP4_MOE_ABI_VERSION);
  EXPECT_STREQ(nvfp4_moe_code_name(NVFP4_MOE_OUT_OF_MEMORY), "out of memory");
  EXPECT_STREQ(nvfp4_moe_code_name(-1), "unknown");
  EXPECT_STREQ(nvfp4_moe_code_name(100), "unknown");
}

}  // namespace
}  // namespace nvfp4_moe
