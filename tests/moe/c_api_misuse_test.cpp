// Misuse of the C interface: every case ends with a code and a text.
#include <cmath>
#include <initializer_list>
#include <thread>

#include "moe/c_layer.h"
#include "support/checkpoint_builder.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

void expect_invalid(std::initializer_list<nvfp4_moe_status> answers) {
  for (const nvfp4_moe_status& answer : answers)
    EXPECT_EQ(answer, kInvalid) << "of call " << &answer - answers.begin();
}

TEST(CApiMisuse, StructsGrowAtTheirEnd) {
  const CLayer c;
  // A caller with an older, shorter header: without the last two fields.
  CLayer older;
  older.config.struct_size = offsetof(nvfp4_moe_config, row_format);
  older.config.batch_invariant = 77;  // not read
  EXPECT_EQ(older.try_open(), kOk) << nvfp4_moe_last_error();
  // And with a newer, longer one: accepted as long as the unknown part is zero.
  struct Newer {
    nvfp4_moe_config config;
    int64_t later = 0;
  } newer{c.config};
  newer.config.struct_size = sizeof(Newer);
  for (const int64_t later : {0, 1}) {
    newer.later = later;
    nvfp4_moe_layer* layer = nullptr;
    EXPECT_EQ(nvfp4_moe_layer_open_tensors(&newer.config, &c.tensors, &c.options, &layer),
              later == 0 ? kOk : NVFP4_MOE_STATUS_UNSUPPORTED);
    EXPECT_EQ(layer == nullptr, later == 1);
    nvfp4_moe_layer_close(layer);
  }

  // Structs that are filled: the unknown part becomes zero, and nothing past a shorter struct's end
  // is written.
  const nvfp4_moe::Layer open = c.open();
  const nvfp4_moe::Workspace workspace(open.workspace_bytes(4));
  TinyBatch batch(c.tiny.options, 4);
  open.run(c_batch(batch), workspace);
  struct NewerStatus {
    nvfp4_moe_run_status status;
    uint64_t later = 5;
  } status{};
  const auto fill = [&](size_t struct_size) {
    status.status.struct_size = struct_size;
    status.status.hidden_blocks = status.status.nonfinite_outputs = 999;
    EXPECT_EQ(nvfp4_moe_layer_run_status(open.get(), workspace.data(), workspace.size_bytes(),
                                         &status.status),
              kOk);
  };
  fill(sizeof(status));
  EXPECT_EQ(status.later, 0u);
  EXPECT_EQ(status.status.nonfinite_outputs, 0u);
  fill(offsetof(nvfp4_moe_run_status, hidden_blocks));
  EXPECT_EQ(status.status.hidden_blocks, 999u);
  fill(offsetof(nvfp4_moe_run_status, nonfinite_weights));  // of the first release's header
  EXPECT_NE(status.status.hidden_blocks, 999u);
  EXPECT_EQ(status.status.nonfinite_outputs, 999u);
}

TEST(CApiMisuse, OpeningRefuses) {
  const struct {
    const char* text;
    std::function<void(CLayer&)> misuse;
    nvfp4_moe_status code = kInvalid;
  } cases[] = {
      {"config.struct_size", [](CLayer& c) { c.config.struct_size = SIZE_MAX; }},
      {"config.struct_size",
       [](CLayer& c) { c.config.struct_size = sizeof(c.config) - 1; }},  // cuts a field in two
      {"tensors.struct_size",
       [](CLayer& c) { c.tensors.struct_size = offsetof(nvfp4_moe_layer_tensors, shared) + 4; }},
      {"options.struct_size", [](CLayer& c) { c.options.struct_size = 7; }},
      {"activation: expected 0 to 7, got 8", [](CLayer& c) { c.config.activation = 8; }},
      {"activation_format: expected 0 to 3", [](CLayer& c) { c.config.activation_format = 4; }},
      {"activation_scale: expected 0 to 2", [](CLayer& c) { c.config.activation_scale = 3; }},
      {"intermediate_scale: expected 0 to 2", [](CLayer& c) { c.config.intermediate_scale = 99; }},
      {"router_weight: expected 0 to 2", [](CLayer& c) { c.config.router_weight = 3; }},
      {"row_format: expected 0 to 1", [](CLayer& c) { c.config.row_format = INT32_MIN; }},
      {"batch_invariant: expected 0 or 1", [](CLayer& c) { c.config.batch_invariant = 2; }},
      {"situ_up_limit: expected a limit with activation situ, got none",
       [](CLayer& c) { c.config.activation = 7, c.config.situ_gate_limit = 4; }},
      {"situ_gate_limit: expected none with activation gelu, got 4",
       [](CLayer& c) { c.config.activation = 5, c.config.situ_gate_limit = 4; }},
      {"swiglu_limit", [](CLayer& c) { c.config.activation = 1, c.config.swiglu_limit = NAN; }},
      {"", [](CLayer& c) { c.config.hidden_size = int64_t{1} << 60; }},
      {"shared", [](CLayer& c) { c.config.shared_intermediate_size = 16; }},
      {"max_tokens", [](CLayer& c) { c.options.max_tokens = INT64_MAX; }},
      {"threads", [](CLayer& c) { c.options.threads = -1; }},
      {"expert range", [](CLayer& c) { c.options.first_expert = 4, c.options.expert_count = 1; }},
      {"backend: expected one of", [](CLayer& c) { c.options.backend = "warp"; }},
      {"cache_directory", [](CLayer& c) { c.options.cache_directory = "/tmp"; }},
      {"slice", [](CLayer& c) { c.options.slice_count = 16; }},
      {"cache_checksum", [](CLayer& c) { c.options.cache_checksum = 2; }},
      {"cache_trusted", [](CLayer& c) { c.options.cache_trusted = -1; }},
      {"gate_codes: expected a pointer", [](CLayer& c) { c.tensors.gate_codes = nullptr; }},
      {"up_block_scales: expected a pointer",
       [](CLayer& c) { c.tensors.up_block_scales = nullptr; }},
      {"down_tensor_scales: expected a pointer",
       [](CLayer& c) { c.tensors.down_tensor_scales = nullptr; }},
      {"hidden_scale", [](CLayer& c) { c.tensors.hidden_scale = -1; }},
      {"intermediate_scale", [](CLayer& c) { c.tensors.intermediate_scale = NAN; }},
      {"tensors.shared: expected null", [](CLayer& c) { c.tensors.shared = &c.shared; }},
      {"tensors.reserved: expected 0", [](CLayer& c) { c.tensors.reserved = 1; }},
      {"tensors.on_device: expected 0 or 1, got 2", [](CLayer& c) { c.tensors.on_device = 2; }},
      {"tensors.stream: expected null", [](CLayer& c) { c.tensors.stream = &c; }},
      {"expert 0: codes, block scales: expected host memory",
       [](CLayer& c) { c.tensors.on_device = 1; }},
      {"expert 0: down block scale", [](CLayer& c) { c.arrays[5][0] = 0xFF; },
       NVFP4_MOE_STATUS_BAD_INPUT},
  };
  for (const auto& misuse : cases) {
    CLayer c;
    misuse.misuse(c);
    EXPECT_EQ(c.try_open(), misuse.code) << misuse.text;
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(misuse.text));
  }
  const CLayer c;
  nvfp4_moe_layer* layer = nullptr;
  expect_invalid({nvfp4_moe_layer_open_tensors(nullptr, &c.tensors, &c.options, &layer),
                  nvfp4_moe_layer_open_tensors(&c.config, nullptr, &c.options, &layer),
                  nvfp4_moe_layer_open_tensors(&c.config, &c.tensors, nullptr, &layer),
                  nvfp4_moe_layer_open_tensors(&c.config, &c.tensors, &c.options, nullptr)});
}

TEST(CApiMisuse, RunningRefuses) {
  const CLayer c;
  const nvfp4_moe::Layer layer = c.open();
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(16));
  TinyBatch batch(c.tiny.options, 4);
  const struct {
    const char* text;
    std::function<void(nvfp4_moe_batch&)> misuse;
  } cases[] = {
      {"batch.struct_size", [](nvfp4_moe_batch& b) { b.struct_size = 3; }},
      {"batch.reserved", [](nvfp4_moe_batch& b) { b.reserved = 1; }},
      {"hidden_dtype: expected 0 to 5", [](nvfp4_moe_batch& b) { b.hidden_dtype = 6; }},
      {"out_dtype", [](nvfp4_moe_batch& b) { b.out_dtype = -1; }},
      {"out: expected a pointer", [](nvfp4_moe_batch& b) { b.out = nullptr; }},
  };
  const auto run = [&](const nvfp4_moe_batch* call, void* space, size_t bytes) {
    return nvfp4_moe_layer_run(layer.get(), call, space, bytes, nullptr);
  };
  for (const auto& [text, misuse] : cases) {
    nvfp4_moe_batch call = c_batch(batch);
    misuse(call);
    EXPECT_EQ(run(&call, workspace.data(), workspace.size_bytes()), kInvalid) << text;
    EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr(text));
  }
  const nvfp4_moe_batch good = c_batch(batch);
  expect_invalid({run(nullptr, workspace.data(), workspace.size_bytes()), run(&good, nullptr, 0),
                  run(&good, workspace.data(), 10),
                  nvfp4_moe_layer_run(nullptr, &good, workspace.data(), 0, nullptr)});
  for (const float value : batch.out) EXPECT_EQ(value, -77.0f);
}

TEST(CApiMisuse, NullsElsewhere) {
  char* text = nullptr;
  nvfp4_moe_checkpoint* checkpoint = nullptr;
  size_t bytes = 0;
  EXPECT_NE(nvfp4_moe_checkpoint_open("/no/such/model", &checkpoint), kOk);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("/no/such/model"));
  nvfp4_moe_checkpoint_options reading{};  // struct_size 0
  expect_invalid({nvfp4_moe_checkpoint_open_with("/no/such/model", &reading, &checkpoint)});
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("options.struct_size"));
  EXPECT_NE(nvfp4_moe_replay("/no/such/file", nullptr, &text), kOk);
  expect_invalid({nvfp4_moe_checkpoint_open(nullptr, &checkpoint),
                  nvfp4_moe_checkpoint_open("/", nullptr),
                  nvfp4_moe_checkpoint_open_with(nullptr, nullptr, &checkpoint),
                  nvfp4_moe_checkpoint_info(nullptr, &text),
                  nvfp4_moe_checkpoint_findings(nullptr, -1, &text),
                  nvfp4_moe_checkpoint_config(nullptr, 0, nullptr),
                  nvfp4_moe_layer_open_checkpoint(nullptr, 0, nullptr, nullptr, nullptr),
                  nvfp4_moe_layer_describe(nullptr, &text),
                  nvfp4_moe_layer_workspace_bytes(nullptr, 1, &bytes),
                  nvfp4_moe_layer_run_status(nullptr, nullptr, 0, nullptr),
                  nvfp4_moe_layer_replace_expert(nullptr, 0, nullptr),
                  nvfp4_moe_layer_replace_expert_on_stream(nullptr, 0, nullptr, nullptr),
                  nvfp4_moe_layer_unpack_expert(nullptr, 0, nullptr),
                  nvfp4_moe_layer_write_repro(nullptr, nullptr, 0, nullptr),
                  nvfp4_moe_replay(nullptr, nullptr, &text),
                  nvfp4_moe_replay("/no/such/file", nullptr, nullptr),
                  nvfp4_moe_explain(nullptr, nullptr, &text),
                  nvfp4_moe_plan(nullptr, nullptr, 0, 0, &text, nullptr, nullptr),
                  nvfp4_moe_linear_open(nullptr, nullptr),
                  nvfp4_moe_linear_describe(nullptr, &text),
                  nvfp4_moe_linear_workspace_bytes(nullptr, 1, &bytes),
                  nvfp4_moe_linear_run(nullptr, nullptr, nullptr, 0, nullptr)});
  EXPECT_EQ(checkpoint, nullptr);
  EXPECT_EQ(text, nullptr);
  nvfp4_moe_checkpoint_close(nullptr);
  nvfp4_moe_layer_close(nullptr);
  nvfp4_moe_linear_close(nullptr);
  nvfp4_moe_text_free(nullptr);
}

// formats_test.cpp tests the checks; this tests that each function performs them, and reads its
// structs and numbers.
TEST(CApiMisuse, FormatFunctions) {
  const float x[32] = {};
  uint8_t codes[8], scales[1], byte = 0;
  int8_t int8_codes[16];
  float scale = 0, negative = -1, nan = NAN, int8_scales[1];
  nvfp4_moe_quantize_counts counts{};  // struct_size 0
  const auto quantize = [&](const void* in, int32_t dtype, int64_t rows, int32_t search,
                            float* of_tensor, nvfp4_moe_quantize_counts* counted = nullptr) {
    return nvfp4_moe_quantize(in, dtype, rows, 16, search, of_tensor, codes, &byte, counted);
  };
  auto swiglu = nvfp4_moe::make<nvfp4_moe_swiglu>();
  swiglu.dtype = kF32;
  const auto swiglu_quantize = [&](int64_t inner, const nvfp4_moe_swiglu& options) {
    return nvfp4_moe_swiglu_quantize(&options, x, 1, inner, nullptr, codes, scales, &scale,
                                     nullptr);
  };
  nvfp4_moe_swiglu unknown = swiglu, sizeless = swiglu;
  unknown.activation = 99;
  sizeless.struct_size = 0;
  expect_invalid({quantize(nullptr, 0, 1, 0, &scale),
                  quantize(x, kF32, INT64_MAX, 0, &scale),
                  quantize(x, NVFP4_MOE_DTYPE_I32, 1, 0, &scale),
                  quantize(x, kF32, 1, 3, &scale),
                  quantize(x, kF32, 1, 0, nullptr),
                  quantize(x, kF32, 1, 0, &negative),
                  quantize(x, kF32, 1, 0, &scale, &counts),
                  nvfp4_moe_quantize_dynamic_token(x, kF32, 1, 16, codes, scales, nullptr, nullptr),
                  nvfp4_moe_quantize_static(x, kF32, 1, 16, nullptr, codes, scales, nullptr),
                  nvfp4_moe_quantize_static(x, kF32, 1, 16, &nan, codes, scales, nullptr),
                  nvfp4_moe_quantize_vllm_order(x, kF32, 1, 16, 0.0f, codes, scales, nullptr),
                  nvfp4_moe_quantize_int8_block(x, kF32, 1, 16, nullptr, int8_scales, nullptr),
                  nvfp4_moe_quantize_int8_block(x, kF32, 1, 15, int8_codes, int8_scales, nullptr),
                  nvfp4_moe_quantize_int8_block(x, kF32, 1, 16, int8_codes, int8_scales, &counts),
                  nvfp4_moe_dequantize(codes, scales, 1, 1, 16, 9, &scale),
                  nvfp4_moe_convert_to_fp8(codes, scales, 1, 1, 16, -1, 3, codes, &scale),
                  nvfp4_moe_pack_codes(nullptr, 2, codes),
                  nvfp4_moe_unpack_codes(codes, -2, codes),
                  nvfp4_moe_swizzle_scales(codes, -1, 1, codes),
                  nvfp4_moe_unswizzle_scales(nullptr, 1, 1, codes),
                  swiglu_quantize(17, swiglu),
                  swiglu_quantize(16, unknown),
                  swiglu_quantize(16, sizeless)});
  EXPECT_EQ(quantize(nullptr, 0, 0, 0, &scale), kOk);  // no rows
  EXPECT_EQ(nvfp4_moe_swizzle_scales(nullptr, 0, 4, nullptr), kOk);
}

// Mistakes are reported as such in every build; without CUDA everything else is UNSUPPORTED.
TEST(CApiMisuse, DeviceFormats) {
  const float x[32] = {};
  alignas(8) uint8_t codes[8] = {};
  uint8_t scales[1] = {};
  float scale = 0, out[16];
  constexpr int32_t kWeights = NVFP4_MOE_QUANTIZE_MODE_WEIGHTS,
                    kStatic = NVFP4_MOE_QUANTIZE_MODE_STATIC;
  const auto quantize = [&](const char* device, int32_t mode,
                            int32_t search = NVFP4_MOE_SEARCH_MAX) {
    return nvfp4_moe_device_quantize(device, mode, search, x, kF32, 1, 16, 0, codes, scales, &scale,
                                     nullptr);
  };
  auto swiglu = nvfp4_moe::make<nvfp4_moe_swiglu>();
  swiglu.dtype = kF32;
  for (const char* device :
       {"cuda:-1", "cuda:", "cuda:1x", "cpu", "0", "", static_cast<const char*>(nullptr)})
    expect_invalid({quantize(device, kWeights)});
  expect_invalid(
      {quantize("cuda:0", 4), quantize("cuda:0", kWeights, 3), quantize("cuda:0", kStatic),
       nvfp4_moe_device_dequantize("cuda:0", codes, scales, &scale, 2, 1, 16, kF32, out, nullptr),
       nvfp4_moe_device_dequantize("gpu", codes, scales, &scale, 1, 1, 16, kF32, out, nullptr),
       nvfp4_moe_device_swiglu_quantize("cuda:0", &swiglu, nullptr, 1, 16, nullptr, codes, scales,
                                        &scale, nullptr),
       nvfp4_moe_device_swizzle_scales("cuda:0", codes, 1, 1 << 20, 1 << 20, codes, nullptr),
       nvfp4_moe_device_unswizzle_scales("cuda:0", codes, 1, 1, 1, nullptr, nullptr)});
  EXPECT_EQ(quantize("cuda:0", kWeights, NVFP4_MOE_SEARCH_SWEEP), NVFP4_MOE_STATUS_UNSUPPORTED);
  EXPECT_EQ(nvfp4_moe_device_swizzle_scales("cuda:0", nullptr, 0, 4, 4, nullptr, nullptr), kOk);
  EXPECT_NE(quantize("cuda:9999", kWeights), kOk);
  EXPECT_STRNE(nvfp4_moe_last_error(), "");
}

TEST(CApiMisuse, ErrorsNameTheFindingThatCausesThem) {
  CheckpointBuilder builder({.model_type = "deepseek_v4"});
  builder.plant(Plant::kNanBlockScale, 1, 3);
  const TempDir directory;
  ASSERT_OK(builder.write(directory.path().string()));
  const nvfp4_moe::Checkpoint checkpoint(directory.path().string());
  auto options = nvfp4_moe::make<nvfp4_moe_layer_options>();
  options.max_tokens = 1;
  nvfp4_moe_layer* layer = nullptr;
  EXPECT_EQ(nvfp4_moe_layer_open_checkpoint(checkpoint.get(), 1, nullptr, &options, &layer),
            NVFP4_MOE_STATUS_BAD_INPUT);
  EXPECT_THAT(nvfp4_moe_last_error(),
              AllOf(HasSubstr("layer 1 expert 3 "), testing::EndsWith("[block_scale_nan]")));
}

TEST(CApiMisuse, ErrorsBelongToTheirThread) {
  EXPECT_NE(nvfp4_moe_checkpoint_open("/no/such/first", nullptr), kOk);
  const std::string mine = nvfp4_moe_last_error();
  std::string others_before, others_after;
  std::thread([&] {
    others_before = nvfp4_moe_last_error();
    nvfp4_moe_checkpoint* checkpoint = nullptr;
    EXPECT_NE(nvfp4_moe_checkpoint_open("/no/such/second", &checkpoint), kOk);
    others_after = nvfp4_moe_last_error();
  }).join();
  EXPECT_EQ(others_before, "");
  EXPECT_THAT(others_after, HasSubstr("/no/such/second"));
  EXPECT_EQ(mine, nvfp4_moe_last_error());
}

}  // namespace
}  // namespace nvfp4_moe::internal
