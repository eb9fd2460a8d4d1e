// The C++ header gives the results of the C functions that it wraps, and throws their errors.
#include <nlohmann/json.hpp>

#include "moe/c_layer.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

// The status of the exception that a call throws; OK if it throws nothing.
template <class Call>
nvfp4_moe_status status_of_call(const Call& call) {
  try {
    call();
    return NVFP4_MOE_STATUS_OK;
  } catch (const nvfp4_moe::Error& error) {
    EXPECT_STRNE(error.what(), "");
    return error.status();
  }
}

constexpr int64_t kRows = 3, kCols = 32;
struct Arrays {
  Arrays() {
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 13) - 6.0f;
  }
  std::vector<float> x = std::vector<float>(kRows * kCols), back = x,
                     row_scales = std::vector<float>(kRows);
  std::vector<uint8_t> codes = std::vector<uint8_t>(kRows * kCols / 2),
                       values = std::vector<uint8_t>(kRows * kCols), packed = codes,
                       scales = std::vector<uint8_t>(kRows * kCols / 16);
};

TEST(CppHeader, QuantizesAndDequantizes) {
  Arrays a;
  float scale = 0;
  auto counts = nvfp4_moe::make<nvfp4_moe_quantize_counts>();
  nvfp4_moe::quantize(a.x.data(), NVFP4_MOE_DTYPE_F32, kRows, kCols, NVFP4_MOE_SEARCH_MSE, scale,
                      a.codes.data(), a.scales.data(), &counts);
  EXPECT_EQ(scale, 6.0f / 2688);
  EXPECT_EQ(counts.blocks, static_cast<uint64_t>(kRows * kCols / 16));
  nvfp4_moe::dequantize(a.codes.data(), a.scales.data(), scale, kRows, kCols, NVFP4_MOE_DTYPE_F32,
                        a.back.data());
  for (size_t i = 0; i < a.x.size(); ++i)
    EXPECT_NEAR(a.back[i], a.x[i], 1.0f);  // half of E2M1's step between 4 and 6
  nvfp4_moe::unpack_codes(a.codes.data(), kRows * kCols, a.values.data());
  nvfp4_moe::pack_codes(a.values.data(), kRows * kCols, a.packed.data());
  EXPECT_EQ(a.packed, a.codes);

  nvfp4_moe::quantize_dynamic_token(a.x.data(), NVFP4_MOE_DTYPE_F32, kRows, kCols, a.codes.data(),
                                    a.scales.data(), a.row_scales.data());
  EXPECT_EQ(a.row_scales, std::vector<float>(kRows, 0x1p-8f)) << "the power of two from 6 / 2688";
  std::vector<uint8_t> again = a.codes;
  scale = 6.0f / 2688;
  nvfp4_moe::quantize_static(a.x.data(), NVFP4_MOE_DTYPE_F32, kRows, kCols, scale, again.data(),
                             a.scales.data());
  EXPECT_EQ(scale, 0x1p-8f);
  EXPECT_EQ(again, a.codes);
  nvfp4_moe::quantize_compat(a.x.data(), NVFP4_MOE_DTYPE_F32, kRows, kCols, scale, again.data(),
                             a.scales.data());
  std::vector<int8_t> bytes(a.x.size());
  std::vector<float> int8_scales(a.scales.size());
  nvfp4_moe::quantize_int8_block(a.x.data(), NVFP4_MOE_DTYPE_F32, kRows, kCols, bytes.data(),
                                 int8_scales.data());
  EXPECT_EQ(int8_scales[0], 6.0f / 127);

  auto swiglu = nvfp4_moe::make<nvfp4_moe_swiglu>();
  swiglu.dtype = NVFP4_MOE_DTYPE_F32;
  std::vector<uint8_t> inner_codes(kRows * kCols / 4), inner_scales(kRows * kCols / 32);
  nvfp4_moe::swiglu_quantize(swiglu, a.x.data(), kRows, kCols / 2, nullptr, inner_codes.data(),
                             inner_scales.data(), a.row_scales.data());
  EXPECT_GT(a.row_scales[0], 0.0f);

  std::vector<uint8_t> fp8(a.x.size());
  std::vector<float> fp8_scales(
      static_cast<size_t>(nvfp4_moe::fp8_scale_count(kRows, kCols, 2, 16)));
  ASSERT_EQ(fp8_scales.size(), 4u);
  nvfp4_moe::convert_to_fp8(a.codes.data(), a.scales.data(), scale, kRows, kCols, 2, 16, fp8.data(),
                            fp8_scales.data());
  EXPECT_GT(fp8_scales[0], 0.0f);

  std::vector<uint8_t> swizzled(static_cast<size_t>(nvfp4_moe::swizzled_bytes(kRows, kCols / 16))),
      linear = a.scales;
  nvfp4_moe::swizzle_scales(a.scales.data(), kRows, kCols / 16, swizzled.data());
  nvfp4_moe::unswizzle_scales(swizzled.data(), kRows, kCols / 16, linear.data());
  EXPECT_EQ(linear, a.scales);
}

TEST(CppHeader, SelectsExperts) {
  std::vector<uint16_t> hidden(8, 0x3F80), weight(2 * 8, 0x3F80);   // ones in bf16
  std::fill(weight.begin(), weight.begin() + 8, uint16_t{0x4000});  // the first expert's are twos
  std::vector<float> logits(2), topk_weights(1);
  auto gemm = nvfp4_moe::make<nvfp4_moe_router_gemm_call>();
  gemm.tokens = 1, gemm.num_experts = 2, gemm.hidden_size = 8;
  gemm.hidden = hidden.data(), gemm.weight = weight.data(), gemm.logits = logits.data();
  gemm.logits_dtype = NVFP4_MOE_DTYPE_F32;
  nvfp4_moe::router_gemm(gemm);
  EXPECT_EQ(logits, (std::vector<float>{16, 8}));

  auto config = nvfp4_moe::make<nvfp4_moe_router_config>();
  config.num_experts = 2, config.top_k = 1;
  std::vector<int32_t> ids(1, -1);
  auto routing = nvfp4_moe::make<nvfp4_moe_router_batch>();
  routing.tokens = 1, routing.logits = logits.data(), routing.logits_dtype = NVFP4_MOE_DTYPE_F32;
  routing.topk_ids = ids.data(), routing.topk_weights = topk_weights.data();
  nvfp4_moe::select_experts(config, routing);
  EXPECT_EQ(ids[0], 0);

  // Every device function refuses a name that is not a GPU's, with C's status.
  Arrays a;
  const auto swiglu = nvfp4_moe::make<nvfp4_moe_swiglu>();
  const std::vector<std::function<void()>> calls = {
      [&] { nvfp4_moe::device_router_gemm("gpu", gemm); },
      [&] { nvfp4_moe::device_select_experts("gpu", config, routing); },
      [&] {
        nvfp4_moe::device_quantize("gpu", NVFP4_MOE_QUANTIZE_MODE_WEIGHTS, NVFP4_MOE_SEARCH_MAX,
                                   a.x.data(), NVFP4_MOE_DTYPE_F32, kRows, kCols, 0, a.codes.data(),
                                   a.scales.data(), a.row_scales.data());
      },
      [&] {
        nvfp4_moe::device_dequantize("gpu", a.codes.data(), a.scales.data(), a.row_scales.data(),
                                     true, kRows, kCols, NVFP4_MOE_DTYPE_F32, a.back.data());
      },
      [&] {
        nvfp4_moe::device_swiglu_quantize("gpu", swiglu, a.x.data(), kRows, kCols / 2, nullptr,
                                          a.codes.data(), a.scales.data(), a.row_scales.data());
      },
      [&] {
        nvfp4_moe::device_swizzle_scales("gpu", a.scales.data(), 1, kRows, 2, a.codes.data());
      },
      [&] {
        nvfp4_moe::device_unswizzle_scales("gpu", a.codes.data(), 1, kRows, 2, a.scales.data());
      },
  };
  for (const auto& call : calls) EXPECT_EQ(status_of_call(call), NVFP4_MOE_STATUS_INVALID_ARGUMENT);
}

TEST(CppHeader, PlansWritesAndReplays) {
  EXPECT_EQ(nvfp4_moe::abi_version(), NVFP4_MOE_ABI_VERSION);
  EXPECT_EQ(nvfp4_moe::status_name(NVFP4_MOE_STATUS_OUT_OF_MEMORY), "out of memory");
  const CLayer c;
  const nvfp4_moe::Plan plan = nvfp4_moe::plan(c.config, c.options);
  EXPECT_NE(plan.text, "");
  const nvfp4_moe::Layer layer = c.open();
  EXPECT_EQ(plan.workspace_bytes, layer.workspace_bytes(c.options.max_tokens));
  EXPECT_GT(plan.packed_bytes, 0u);

  TempDir dir;
  TinyBatch batch(c.tiny.options, 4);
  const nvfp4_moe::Workspace workspace(plan.workspace_bytes);
  layer.run(c_batch(batch), workspace);
  layer.write_repro(c_batch(batch), dir.file("call.safetensors"));
  EXPECT_EQ(nlohmann::json::parse(nvfp4_moe::replay(dir.file("call.safetensors")))["same_bits"],
            true);
  EXPECT_EQ(status_of_call([&] { nvfp4_moe::replay(dir.file("none")); }), NVFP4_MOE_STATUS_IO);

  static std::string logged;
  nvfp4_moe::set_log_callback([](int, const char* text, void*) { logged = text; });
  nvfp4_moe::set_log_callback(nullptr);
}

}  // namespace
}  // namespace nvfp4_moe::internal
