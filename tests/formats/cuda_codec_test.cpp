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

void expect_same_float(float x) {
  ASSERT_EQ(e2m1_from_float(x), cuda_e2m1(x)) << x << " bits " << std::bit_cast<uint32_t>(x);
  ASSERT_EQ(e4m3_from_float(x), cuda_e4m3(x)) << x << " bits " << std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return;  // CUDA gives one canonical NaN; ours keep the payload
  ASSERT_EQ(bf16_from_float(x), cuda_bf16(x)) << x;
  ASSERT_EQ(fp16_from_float(x), cuda_fp16(x)) << x;
}

void expect_same_double(double x) {
  ASSERT_EQ(e2m1_from_double(x), __nv_cvt_double_to_fp4(x, __NV_E2M1, cudaRoundNearest)) << x;
  if (std::isnan(x))
    return;  // CUDA keeps a NaN's sign from double but not from float; ours drops it in both
  ASSERT_EQ(e4m3_from_double(x), __nv_cvt_double_to_fp8(x, __NV_SATFINITE, __NV_E4M3)) << x;
  ASSERT_EQ(bf16_from_double(x), __bfloat16_as_ushort(__double2bfloat16(x))) << x;
  ASSERT_EQ(fp16_from_double(x), __half_as_ushort(__double2half(x))) << x;
}

// Equal bits, or both NaN.
void expect_decoded(float ours, float theirs, unsigned bits) {
  if (std::isnan(theirs))
    ASSERT_TRUE(std::isnan(ours)) << bits;
  else
    ASSERT_EQ(std::bit_cast<uint32_t>(ours), std::bit_cast<uint32_t>(theirs)) << bits;
}

TEST(CudaCodec, DecodesEveryCodeAndPacksInTheSameOrder) {
  for (unsigned code = 0; code < 16; ++code) {
    const auto c = static_cast<__nv_fp4_storage_t>(code);
    expect_decoded(e2m1_to_float(c), __half2float(__half(__nv_cvt_fp4_to_halfraw(c, __NV_E2M1))),
                   code);
  }
  for (unsigned byte = 0; byte < 256; ++byte) {
    const auto b = static_cast<__nv_fp8_storage_t>(byte);
    expect_decoded(e4m3_to_float(b), __half2float(__half(__nv_cvt_fp8_to_halfraw(b, __NV_E4M3))),
                   byte);
  }
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const auto b = static_cast<unsigned short>(bits);
    expect_decoded(fp16_to_float(b), __half2float(__ushort_as_half(b)), bits);
    expect_decoded(bf16_to_float(b), __bfloat162float(__ushort_as_bfloat16(b)), bits);
  }
  for (const float even : {0.5f, -6.0f, 3.0f})
    for (const float odd : {1.0f, -0.0f, 4.0f})
      EXPECT_EQ(pack_codes(e2m1_from_float(even), e2m1_from_float(odd)),
                __nv_cvt_float2_to_fp4x2(float2{even, odd}, __NV_E2M1, cudaRoundNearest));
}

TEST(CudaCodec, EncodesEveryBoundaryAndItsNeighbours) {
  for (const Grid* grid : {&e2m1_grid(), &e4m3_grid(), &bf16_grid(), &fp16_grid()}) {
    for (size_t i = 0; i <= grid->max_index(); ++i) {
      for (const double sign : {1.0, -1.0}) {
        const double d = sign * grid->midpoint(i);
        const auto x = static_cast<float>(d);
        for (const float value : {x, std::nextafter(x, 0.0f), std::nextafter(x, 2 * x)})
          expect_same_float(value);
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
NVFP4_MOE_SKIP_CUDA_TEST(CudaCodec)
#endif

}  // namespace
}  // namespace nvfp4_moe::internal::test
