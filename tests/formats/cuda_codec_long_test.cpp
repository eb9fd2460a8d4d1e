// Every float32 pattern through E2M1, E4M3, bf16 and fp16 against CUDA's host conversions.
#include <atomic>
#include <bit>
#include <cmath>

#include "core/executor.h"
#include "core/float_formats.h"
#include "formats/cuda_codec.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

#if NVFP4_MOE_HAS_CUDA_HEADERS

// The first pattern for which the two disagree, or -1.
template <class Ours, class Theirs>
int64_t first_difference(const Ours& ours, const Theirs& theirs) {
  std::atomic<int64_t> first{-1};
  make_thread_pool()->parallel_for(
      int64_t{1} << 32, int64_t{1} << 20, [&](int64_t begin, int64_t end) {
        for (int64_t bits = begin; bits < end; ++bits) {
          const auto x = std::bit_cast<float>(static_cast<uint32_t>(bits));
          if (ours(x) == theirs(x)) continue;
          int64_t none = -1;
          first.compare_exchange_strong(none, bits);
          return;
        }
      });
  return first;
}

TEST(CudaCodecLong, EveryFloatToE2m1) {
  EXPECT_EQ(
      first_difference(
          [](float x) { return unsigned{e2m1_from_float(x)}; },
          [](float x) { return unsigned{__nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest)}; }),
      -1);
}

TEST(CudaCodecLong, EveryFloatToE4m3) {
  EXPECT_EQ(first_difference([](float x) { return unsigned{e4m3_from_float(x)}; },
                             [](float x) {
                               return unsigned{__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
                             }),
            -1);
}

TEST(CudaCodecLong, EveryFloatToBf16) {
  EXPECT_EQ(first_difference(
                [](float x) { return std::isnan(x) ? 0u : unsigned{bf16_from_float(x)}; },
                [](float x) {
                  return std::isnan(x) ? 0u
                                       : unsigned{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
                }),
            -1);
}

TEST(CudaCodecLong, EveryFloatToFp16) {
  EXPECT_EQ(
      first_difference([](float x) { return std::isnan(x) ? 0u : unsigned{fp16_from_float(x)}; },
                       [](float x) {
                         return std::isnan(x) ? 0u : unsigned{__half_as_ushort(__float2half_rn(x))};
                       }),
      -1);
}

#else
NVFP4_MOE_SKIP_CUDA_TEST(CudaCodecLong, EveryFloatToE2m1)
NVFP4_MOE_SKIP_CUDA_TEST(CudaCodecLong, EveryFloatToE4m3)
NVFP4_MOE_SKIP_CUDA_TEST(CudaCodecLong, EveryFloatToBf16)
NVFP4_MOE_SKIP_CUDA_TEST(CudaCodecLong, EveryFloatToFp16)
#endif

}  // namespace
}  // namespace nvfp4_moe::internal::test
