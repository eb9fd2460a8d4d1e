// The format functions of the C interface, through the C++ header, compute the same as the library.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/dequantize.h"
#include "core/float_formats.h"
#include "core/quantize.h"
#include "core/scale_layout.h"
#include "moe/c_layer.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

constexpr int64_t kRows = 8, kCols = 64;

struct Arrays {
  std::vector<float> x, row_scales;
  std::vector<uint8_t> codes, scales, own_codes, own_scales;
  nvfp4_moe_quantize_counts counts = nvfp4_moe::make<nvfp4_moe_quantize_counts>();
  QuantizeCounts own;

  explicit Arrays(size_t rows) : row_scales(rows) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < rows * kCols; ++i) x.push_back(normal(random));
    codes.resize(x.size() / 2);
    scales.resize(x.size() / 16);
    own_codes = codes;
    own_scales = scales;
  }
  std::span<const float> row(int64_t r) const {
    return {x.data() + r * kCols, static_cast<size_t>(kCols)};
  }
};

// More rows of bf16 than the host processes at a time are one matrix.
TEST(CApi, WeightsAreTheLibrarys) {
  Arrays a(150);
  std::vector<uint16_t> bits;
  for (float& value : a.x) {
    bits.push_back(bf16_from_float(value));
    value = bf16_to_float(bits.back());
  }
  const std::pair<nvfp4_moe_search, ScaleSearch> searches[] = {
      {NVFP4_MOE_SEARCH_MAX, ScaleSearch::kMax},
      {NVFP4_MOE_SEARCH_MSE, ScaleSearch::kMse},
      {NVFP4_MOE_SEARCH_SWEEP, ScaleSearch::kSweep}};
  for (const auto& [search, own_search] : searches) {
    float tensor_scale = 0;
    nvfp4_moe::quantize(bits.data(), NVFP4_MOE_DTYPE_BF16, 150, kCols, search, tensor_scale,
                        a.codes.data(), a.scales.data(), &a.counts);
    EXPECT_EQ(tensor_scale, static_cast<float>(static_cast<double>(row_amax(a.x)) / 2688));
    EXPECT_EQ(a.counts.blocks, 600u);
    ASSERT_OK(quantize_weights(a.x, 150, kCols, tensor_scale, own_search, a.own_codes.data(),
                               a.own_scales.data(), a.own));
    EXPECT_EQ(a.codes, a.own_codes);
    EXPECT_EQ(a.scales, a.own_scales);
    std::vector<float> back(a.x.size()), own_back = back;
    nvfp4_moe::dequantize(a.codes.data(), a.scales.data(), tensor_scale, 150, kCols, kF32,
                          back.data());
    ASSERT_OK(
        dequantize(Nvfp4View::contiguous(a.codes.data(), a.scales.data(), tensor_scale, 150, kCols),
                   DType::kF32, own_back.data()));
    EXPECT_TRUE(same_bits(back, own_back));
  }
  bits[kCols + 3] = 0x7FC0;
  float scale = 0;
  EXPECT_EQ(nvfp4_moe_quantize(bits.data(), NVFP4_MOE_DTYPE_BF16, 150, kCols, 0, &scale,
                               a.codes.data(), a.scales.data(), nullptr),
            kInvalid);
  EXPECT_THAT(nvfp4_moe_last_error(), HasSubstr("row 1"));
}

TEST(CApi, ActivationsAreTheLibrarys) {
  Arrays a(kRows);
  nvfp4_moe::quantize_dynamic_token(a.x.data(), kF32, kRows, kCols, a.codes.data(), a.scales.data(),
                                    a.row_scales.data());
  for (int64_t r = 0; r < kRows; ++r) {
    const float scale = dynamic_token_scale(row_amax(a.row(r)));
    EXPECT_EQ(a.row_scales[static_cast<size_t>(r)], scale);
    quantize_row_exact(a.row(r), scale, a.own_codes.data() + r * kCols / 2,
                       a.own_scales.data() + r * kCols / 16, a.own);
  }
  EXPECT_EQ(a.codes, a.own_codes);
  EXPECT_EQ(a.scales, a.own_scales);

  a.x[kCols + 3] = NAN;
  std::vector<int8_t> int8_codes(kRows * kCols), own_int8 = int8_codes;
  std::vector<float> int8_scales(a.scales.size()), own_int8_scales = int8_scales;
  nvfp4_moe::quantize_int8_block(a.x.data(), kF32, kRows, kCols, int8_codes.data(),
                                 int8_scales.data(), &a.counts);
  EXPECT_EQ(a.counts.nonfinite_rows, 1u);
  EXPECT_EQ(a.counts.blocks, 7u * 4);
  for (int64_t r = 0; r < kRows; ++r)
    quantize_row_int8_block(a.row(r), own_int8.data() + r * kCols,
                            own_int8_scales.data() + r * kCols / 16, a.own);
  EXPECT_EQ(int8_codes, own_int8);
  EXPECT_TRUE(std::isnan(int8_scales[4]) && int8_scales[3] == own_int8_scales[3]);

  float fixed = 0x1.8p-10f;  // between two powers
  nvfp4_moe::quantize_static(a.x.data(), kF32, kRows, kCols, fixed, a.codes.data(), a.scales.data(),
                             &a.counts);
  EXPECT_EQ(fixed, 0x1p-9f) << "the power of two that was used";
  EXPECT_EQ(a.counts.nonfinite_rows, 1u);
  EXPECT_EQ(std::count(a.codes.begin() + 32, a.codes.begin() + 64, 0), 32);
  nvfp4_moe::quantize_vllm_order(a.x.data(), kF32, kRows, kCols, 0.0013f, a.codes.data(),
                                 a.scales.data(), &a.counts);
  quantize_row_vllm_order(a.row(0), 0.0013f, a.own_codes.data(), a.own_scales.data(), a.own);
  EXPECT_TRUE(std::equal(a.codes.begin(), a.codes.begin() + 32, a.own_codes.begin()));
  EXPECT_EQ(a.counts.nonfinite_rows, 1u);
}

TEST(CApi, CodesAndLayoutsGoBothWays) {
  Arrays a(kRows);
  EXPECT_EQ(nvfp4_moe::fp8_scale_count(200, 256, 128, 128), 4);
  EXPECT_EQ(nvfp4_moe::fp8_scale_count(200, 256, 0, 0), 1);
  EXPECT_EQ(nvfp4_moe::fp8_scale_count(200, 256, 0, 128), -1);
  std::vector<uint8_t> fp8(kRows * kCols), scales(a.scales.size(), 0x38);
  float fp8_scale = 0;
  nvfp4_moe::convert_to_fp8(a.codes.data(), scales.data(), 1.0f, kRows, kCols, 0, 0, fp8.data(),
                            &fp8_scale);
  EXPECT_EQ(fp8_scale, 1.0f);

  std::vector<uint8_t> values(16), packed(8), again(16);
  for (size_t i = 0; i < 16; ++i) values[i] = static_cast<uint8_t>(i);
  nvfp4_moe::pack_codes(values.data(), 16, packed.data());
  EXPECT_EQ(packed[0], 0x10);
  nvfp4_moe::unpack_codes(packed.data(), 16, again.data());
  EXPECT_EQ(again, values);
  values[3] = 16;
  EXPECT_EQ(nvfp4_moe_pack_codes(values.data(), 16, packed.data()), kInvalid);
  EXPECT_EQ(nvfp4_moe_pack_codes(values.data(), 15, packed.data()), kInvalid);

  EXPECT_EQ(nvfp4_moe::swizzled_bytes(129, 5), 256 * 8);
  EXPECT_EQ(nvfp4_moe::swizzled_bytes(-1, 5), -1);
  std::vector<uint8_t> linear(129 * 5), swizzled(256 * 8), linear2(129 * 5);
  for (size_t i = 0; i < linear.size(); ++i) linear[i] = static_cast<uint8_t>(i * 7);
  nvfp4_moe::swizzle_scales(linear.data(), 129, 5, swizzled.data());
  EXPECT_EQ(swizzled[static_cast<size_t>(swizzled_scale_offset(77, 3, 5))], linear[77 * 5 + 3]);
  nvfp4_moe::unswizzle_scales(swizzled.data(), 129, 5, linear2.data());
  EXPECT_EQ(linear2, linear);
}

// The fused pass equals its parts: the activation in fp32, bf16, then the quantizer, which has its
// own tests.
TEST(CApi, SwigluQuantizeIsItsParts) {
  constexpr int64_t kTokens = 5, kInner = 48;
  std::mt19937 random(9);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> gate_up(kTokens * 2 * kInner), router(kTokens), row_scales(kTokens);
  for (float& value : gate_up) value = normal(random);
  for (float& value : router) value = std::abs(normal(random));
  gate_up[3 * 2 * kInner + 7] = std::numeric_limits<float>::infinity();
  std::vector<uint8_t> codes(kTokens * kInner / 2), scales(kTokens * kInner / 16),
      codes2(kInner / 2), scales2(kInner / 16);
  for (const bool interleaved : {false, true})
    for (const float power_of_two : {0.0f, 0x1p-7f}) {
      auto options = nvfp4_moe::make<nvfp4_moe_swiglu>();
      options.activation = NVFP4_MOE_ACTIVATION_SWIGLU_CLAMPED;
      options.swiglu_limit = 4.0f;
      options.dtype = kF32;
      options.interleaved = interleaved ? 1 : 0;
      options.power_of_two = power_of_two;
      auto counts = nvfp4_moe::make<nvfp4_moe_quantize_counts>();
      nvfp4_moe::swiglu_quantize(options, gate_up.data(), kTokens, kInner, router.data(),
                                 codes.data(), scales.data(), row_scales.data(), &counts);
      EXPECT_EQ(counts.blocks, static_cast<uint64_t>(kTokens * kInner / 16));
      for (int64_t r = 0; r < kTokens; ++r) {
        const float* row = gate_up.data() + r * 2 * kInner;
        std::vector<float> h(kInner);
        for (int64_t i = 0; i < kInner; ++i) {
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
  auto gelu = nvfp4_moe::make<nvfp4_moe_swiglu>();
  gelu.activation = NVFP4_MOE_ACTIVATION_GELU;
  gelu.dtype = kF32;
  auto situ = gelu;
  situ.activation = NVFP4_MOE_ACTIVATION_SITU;
  situ.situ_gate_limit = 4.0f;
  situ.situ_up_limit = 25.0f;
  for (const nvfp4_moe_swiglu* options : {&gelu, &situ}) {
    nvfp4_moe::swiglu_quantize(*options, gate_up.data(), 1, kInner, nullptr, codes.data(),
                               scales.data(), row_scales.data());
    std::vector<float> h(kInner);
    for (int64_t i = 0; i < kInner; ++i) {
      const double g = gate_up[i], u = gate_up[kInner + i];
      const double exact = options == &gelu
                               ? g * std::erfc(-g / std::sqrt(2.0)) / 2 * u
                               : 4 * std::tanh(g / 4) / (1 + std::exp(-g)) * 25 * std::tanh(u / 25);
      h[static_cast<size_t>(i)] = bf16_to_float(bf16_from_float(static_cast<float>(exact)));
    }
    QuantizeCounts own;
    quantize_row_exact(h, dynamic_token_scale(row_amax(h)), codes2.data(), scales2.data(), own);
    EXPECT_TRUE(std::equal(codes2.begin(), codes2.end(), codes.begin()));
    EXPECT_EQ(row_scales[0], dynamic_token_scale(row_amax(h)));
  }
  auto plain = nvfp4_moe::make<nvfp4_moe_swiglu>();
  plain.dtype = kF32;
  nvfp4_moe::swiglu_quantize(plain, gate_up.data(), kTokens, kInner, nullptr, codes.data(),
                             scales.data(), row_scales.data());
  EXPECT_TRUE(std::isnan(row_scales[3])) << "the row's scale carries an infinity";
  EXPECT_EQ(std::count(codes.begin() + 3 * kInner / 2, codes.begin() + 4 * kInner / 2, 0),
            kInner / 2);
}

}  // namespace
}  // namespace nvfp4_moe::internal
