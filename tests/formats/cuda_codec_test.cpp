// The codecs against CUDA's host conversions; cuda_codec_long_test.cpp tests every float32.
#include "formats/cuda_codec.h"

#include <bit>
#include <cmath>

#include "core/float_formats.h"
#include "formats/grid.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

#if NVFP4_MOE_HAS_CUDA_HEADERS

unsigned cuda_e2m1(float x) { return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
unsigned cuda_e2m1(double x) { return __nv_cvt_double_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
unsigned cuda_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
unsigned cuda_e4m3(double x) { return __nv_cvt_double_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

void expect_same_float(float x) {
  ASSERT_EQ(e2m1_from_float(x), cuda_e2m1(x)) << x << " bits " << std::bit_cast<uint32_t>(x);
  ASSERT_EQ(e4m3_from_float(x), cuda_e4m3(x)) << x << " bits " << std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return;  // CUDA gives one canonical NaN; ours keep the payload
  ASSERT_EQ(bf16_from_float(x), __bfloat16_as_ushort(__float2bfloat16_rn(x))) << x;
  ASSERT_EQ(fp16_from_float(x), __half_as_ushort(__float2half_rn(x))) << x;
}

void expect_same_double(double x) {
  ASSERT_EQ(e2m1_from_double(x), cuda_e2m1(x)) << x;
  if (std::isnan(x))
    return;  // CUDA keeps a NaN's sign from double but not from float; ours drops it in both
  ASSERT_EQ(e4m3_from_double(x), cuda_e4m3(x)) << x;
  ASSERT_EQ(bf16_from_double(x), __bfloat16_as_ushort(__double2bfloat16(x))) << x;
  ASSERT_EQ(fp16_from_double(x), __half_as_ushort(__double2half(x))) << x;
}

TEST(CudaCodec, DecodesEveryCode) {
  for (unsigned code = 0; code < 16; ++code) {
    const auto c = static_cast<__nv_fp4_storage_t>(code);
    const __half half(__nv_cvt_fp4_to_halfraw(c, __NV_E2M1));
    EXPECT_EQ(std::bit_cast<uint32_t>(e2m1_to_float(c)),
              std::bit_cast<uint32_t>(__half2float(half)))
        << code;
  }
  for (unsigned byte = 0; byte < 256; ++byte) {
    const auto b = static_cast<__nv_fp8_storage_t>(byte);
    const float theirs = __half2float(__half(__nv_cvt_fp8_to_halfraw(b, __NV_E4M3)));
    if (std::isnan(theirs)) {
      EXPECT_TRUE(std::isnan(e4m3_to_float(b))) << byte;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(e4m3_to_float(b)), std::bit_cast<uint32_t>(theirs)) << byte;
    }
  }
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const auto b = static_cast<unsigned short>(bits);
    const float half = __half2float(__ushort_as_half(b));
    if (!std::isnan(half)) {
      ASSERT_EQ(std::bit_cast<uint32_t>(fp16_to_float(b)), std::bit_cast<uint32_t>(half));
    }
    const float bf16 = __bfloat162float(__ushort_as_bfloat16(b));
    if (!std::isnan(bf16)) {
      ASSERT_EQ(std::bit_cast<uint32_t>(bf16_to_float(b)), std::bit_cast<uint32_t>(bf16));
    }
  }
}

TEST(CudaCodec, PacksInTheSameOrder) {
  for (const float even : {0.5f, -6.0f, 3.0f})
    for (const float odd : {1.0f, -0.0f, 4.0f})
      EXPECT_EQ(pack_codes(e2m1_from_float(even), e2m1_from_float(odd)),
                __nv_cvt_float2_to_fp4x2(float2{even, odd}, __NV_E2M1, cudaRoundNearest));
}

TEST(CudaCodec, EncodesAllBf16AndTheirNeighbours) {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const auto x = std::bit_cast<float>(bits << 16);
    for (const float value :
         {x, std::bit_cast<float>((bits << 16) | 1u), std::bit_cast<float>((bits << 16) | 0x8000u),
          std::bit_cast<float>((bits << 16) | 0x7FFFu),
          std::bit_cast<float>((bits << 16) | 0x8001u)})
      expect_same_float(value);
    expect_same_double(static_cast<double>(x));
  }
}

TEST(CudaCodec, EncodesEveryBoundaryAndItsNeighbours) {
  for (const Grid* grid : {&e2m1_grid(), &e4m3_grid(), &bf16_grid(), &fp16_grid()}) {
    for (size_t i = 0; i <= grid->max_index(); ++i) {
      const double mid = grid->midpoint(i);
      for (const double s : {1.0, -1.0}) {
        const auto x = static_cast<float>(s * mid);
        for (const float value : {x, std::nextafter(x, 0.0f), std::nextafter(x, 2 * x)})
          expect_same_float(value);
        const double d = s * mid;
        for (const double value :
             {d, std::nextafter(d, 0.0), std::nextafter(d, 2 * d), d * (1 + 0x1p-30)})
          expect_same_double(value);
      }
    }
  }
}

TEST(CudaCodec, EncodesASampleOfAllPatterns) {
  uint32_t bits = 0;
  for (int n = 0; n < (1 << 20); ++n, bits += 0x9E3779B1u)
    expect_same_float(std::bit_cast<float>(bits));
  uint64_t pattern = 0;
  for (int n = 0; n < (1 << 18); ++n, pattern += 0x9E3779B97F4A7C15u) {
    expect_same_double(std::bit_cast<double>(pattern));
    // Most random doubles are far outside these formats; bring their exponents to -40..23.
    expect_same_double(std::bit_cast<double>((pattern & 0x83FFFFFFFFFFFFFFu) + (983ull << 52)));
  }
}

#else
NVFP4_MOE_SKIP_CUDA_TEST(CudaCodec, DecodesEveryCode)
NVFP4_MOE_SKIP_CUDA_TEST(CudaCodec, PacksInTheSameOrder)
NVFP4_MOE_SKIP_CUDA_TEST(CudaCodec, EncodesAllBf16AndTheirNeighbours)
NVFP4_MOE_SKIP_CUDA_TEST(CudaCodec, EncodesEveryBoundaryAndItsNeighbours)
NVFP4_MOE_SKIP_CUDA_TEST(CudaCodec, EncodesASampleOfAllPatterns)
#endif

}  // namespace
}  // namespace nvfp4_moe::internal::test
