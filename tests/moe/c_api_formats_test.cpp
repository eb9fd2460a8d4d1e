// The C interface's format functions compute the same as the library.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/float_formats.h"
#include "core/quantize.h"
#include "core/scale_layout.h"
#include "moe/c_layer.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
using testing::HasSubstr;

TEST(CApi, FormatFunctionsAreTheLibrarys) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> x(8 * 64);
  for (auto& value : x) value = normal(random);
  std::vector<uint8_t> codes(8 * 32), scales(8 * 4);
  float tensor_scale = 0;
  auto counts = nvfp4_moe::make<nvfp4_moe_quantize_counts>();
  ASSERT_EQ(nvfp4_moe_quantize(x.data(), kF32, 8, 64, NVFP4_MOE_SEARCH_MSE, &tensor_scale,
                               codes.data(), scales.data(), &counts),
            kOk);
  float amax = 0;
  for (const float value : x) amax = std::max(amax, std::abs(value));
  EXPECT_EQ(tensor_scale, static_cast<float>(static_cast<double>(amax) / 2688));
  EXPECT_EQ(counts.blocks, 32u);
  std::vector<uint8_t> codes2(codes.size()), scales2(scales.size());
  QuantizeCounts own;
  ASSERT_OK(quantize_weights(x, 8, 64, tensor_scale, ScaleSearch::kMse, codes2.data(),
                             scales2.data(), own));
  EXPECT_EQ(codes, codes2);
  EXPECT_EQ(scales, scales2);

  ASSERT_EQ(nvfp4_moe_quantize(x.data(), kF32, 8, 64, NVFP4_MOE_SEARCH_SWEEP, &tensor_scale,
                               codes2.data(), scales2.data(), nullptr),
            kOk);
  std::vector<uint8_t> codes3(codes.size()), scales3(scales.size());
  ASSERT_OK(quantize_weights(x, 8, 64, tensor_scale, ScaleSearch::kSweep, codes3.data(),
                             scales3.data(), own));
  EXPECT_EQ(scales2, scales3);
  EXPECT_EQ(codes2, codes3);
  EXPECT_NE(scales2, scales);

  // Decoded elements are at most as far off as the widest gap of E2M1 (1 at scale 1, between 4 and
  // 6) allows.
  std::vector<float> back(x.size());
  ASSERT_EQ(
      nvfp4_moe_dequantize(codes.data(), scales.data(), tensor_scale, 8, 64, kF32, back.data()),
      kOk);
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_LE(std::abs(back[i] - x[i]), 2.01 * e4m3_to_float(scales[i / 16]) * tensor_scale);

  std::vector<float> row_scales(8);
  ASSERT_EQ(nvfp4_moe_quantize_dynamic_token(x.data(), kF32, 8, 64, codes.data(), scales.data(),
                                             row_scales.data(), nullptr),
            kOk);
  for (int64_t r = 0; r < 8; ++r) {
    const std::span<const float> row(x.data() + r * 64, 64);
    EXPECT_EQ(row_scales[static_cast<size_t>(r)], dynamic_token_scale(row_amax(row)));
    quantize_row_exact(row, row_scales[static_cast<size_t>(r)], codes2.data() + r * 32,
                       scales2.data() + r * 4, own);
  }
  EXPECT_EQ(codes, codes2);
  EXPECT_EQ(scales, scales2);

  std::vector<int8_t> int8_codes(8 * 64), int8_codes2 = int8_codes;
  std::vector<float> int8_scales(8 * 4), int8_scales2 = int8_scales;
  x[64 + 3] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_EQ(nvfp4_moe_quantize_int8_block(x.data(), kF32, 8, 64, int8_codes.data(),
                                          int8_scales.data(), &counts),
            kOk);
  EXPECT_EQ(counts.nonfinite_rows, 1u);
  EXPECT_EQ(counts.blocks, 7u * 4);
  for (size_t r = 0; r < 8; ++r)
    quantize_row_int8_block({x.data() + r * 64, 64}, int8_codes2.data() + r * 64,
                            int8_scales2.data() + r * 4, own);
  EXPECT_EQ(int8_codes, int8_codes2);
  EXPECT_EQ(
      std::memcmp(int8_scales.data(), int8_scales2.data(), int8_scales.size() * sizeof(float)), 0);
  EXPECT_TRUE(std::isnan(int8_scales[4]) && std::isfinite(int8_scales[3]));
  float fixed = 0x1.8p-10f;  // between two powers
  ASSERT_EQ(nvfp4_moe_quantize_static(x.data(), kF32, 8, 64, &fixed, codes.data(), scales.data(),
                                      &counts),
            kOk);
  EXPECT_EQ(fixed, 0x1p-9f) << "the power of two that was used";
  EXPECT_EQ(counts.nonfinite_rows, 1u);
  EXPECT_EQ(std::count(codes.begin() + 32, codes.begin() + 64, 0), 32);
  EXPECT_EQ(nvfp4_moe_quantize_compat(x.data(), kF32, 8, 64, 0.0013f, codes.data(), scales.data(),
                                      &counts),
            kOk);
  EXPECT_EQ(counts.nonfinite_rows, 1u);
  EXPECT_EQ(nvfp4_moe_quantize(x.data(), kF32, 8, 64, 0, &tensor_scale, codes.data(), scales.data(),
                               nullptr),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);  // NaN in weights
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("row 1"));

  EXPECT_EQ(nvfp4_moe_fp8_scale_count(200, 256, 128, 128), 4);
  EXPECT_EQ(nvfp4_moe_fp8_scale_count(200, 256, 0, 0), 1);
  EXPECT_EQ(nvfp4_moe_fp8_scale_count(200, 256, 0, 128), -1);
  std::vector<uint8_t> fp8(8 * 64);
  float fp8_scale = 0;
  ASSERT_EQ(nvfp4_moe_convert_to_fp8(codes.data(), scales.data(), 1.0f, 8, 64, 0, 0, fp8.data(),
                                     &fp8_scale),
            kOk);
  EXPECT_GT(fp8_scale, 0.0f);

  std::vector<uint8_t> values(16), packed(8), again(16);
  for (size_t i = 0; i < 16; ++i) values[i] = static_cast<uint8_t>(i);
  ASSERT_EQ(nvfp4_moe_pack_codes(values.data(), 16, packed.data()), kOk);
  EXPECT_EQ(packed[0], 0x10);
  ASSERT_EQ(nvfp4_moe_unpack_codes(packed.data(), 16, again.data()), kOk);
  EXPECT_EQ(again, values);
  values[3] = 16;
  EXPECT_EQ(nvfp4_moe_pack_codes(values.data(), 16, packed.data()),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(nvfp4_moe_pack_codes(values.data(), 15, packed.data()),
            NVFP4_MOE_STATUS_INVALID_ARGUMENT);

  EXPECT_EQ(nvfp4_moe_swizzled_bytes(129, 5), 256 * 8);
  EXPECT_EQ(nvfp4_moe_swizzled_bytes(-1, 5), -1);
  std::vector<uint8_t> linear(129 * 5), swizzled(256 * 8), linear2(129 * 5);
  for (auto& byte : linear) byte = static_cast<uint8_t>(random());
  ASSERT_EQ(nvfp4_moe_swizzle_scales(linear.data(), 129, 5, swizzled.data()), kOk);
  EXPECT_EQ(swizzled[static_cast<size_t>(swizzled_scale_offset(77, 3, 5))], linear[77 * 5 + 3]);
  ASSERT_EQ(nvfp4_moe_unswizzle_scales(swizzled.data(), 129, 5, linear2.data()), kOk);
  EXPECT_EQ(linear2, linear);
}

// The fused pass equals its parts: the activation in fp32, bf16, then the quantizer, which has its
// own tests.
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
      options.dtype = kF32;
      options.interleaved = interleaved ? 1 : 0;
      options.power_of_two = power_of_two;
      std::vector<uint8_t> codes(kRows * kInner / 2), scales(kRows * kInner / 16),
          codes2(kInner / 2), scales2(kInner / 16);
      std::vector<float> row_scales(kRows);
      auto counts = nvfp4_moe::make<nvfp4_moe_quantize_counts>();
      ASSERT_EQ(nvfp4_moe_swiglu_quantize(&options, gate_up.data(), kRows, kInner, router.data(),
                                          codes.data(), scales.data(), row_scales.data(), &counts),
                kOk)
          << nvfp4_moe_last_error();
      EXPECT_EQ(counts.blocks, static_cast<uint64_t>(kRows * kInner / 16));
      for (int64_t r = 0; r < kRows; ++r) {
        std::vector<float> h(kInner);
        for (int64_t i = 0; i < kInner; ++i) {
          const float* row = gate_up.data() + r * 2 * kInner;
          const float g = std::min(row[interleaved ? 2 * i : i], 4.0f);
          const float u = std::clamp(row[interleaved ? 2 * i + 1 : kInner + i], -4.0f, 4.0f);
          const float sigmoid = 1.0f / (1.0f + std::exp(-g));
          h[static_cast<size_t>(i)] =
              bf16_to_float(bf16_from_float(g * sigmoid * u * router[static_cast<size_t>(r)]));
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
  plain.dtype = kF32;
  std::vector<uint8_t> codes(kRows * kInner / 2, 1), scales(kRows * kInner / 16, 1);
  std::vector<float> row_scales(kRows);
  ASSERT_EQ(nvfp4_moe_swiglu_quantize(&plain, gate_up.data(), kRows, kInner, nullptr, codes.data(),
                                      scales.data(), row_scales.data(), nullptr),
            kOk);
  EXPECT_TRUE(std::isnan(row_scales[3]))
      << "an infinity that nothing clamps is carried by the row's scale";
  EXPECT_EQ(std::count(codes.begin() + 3 * kInner / 2, codes.begin() + 4 * kInner / 2, 0),
            kInner / 2);
}

}  // namespace
}  // namespace nvfp4_moe::internal
