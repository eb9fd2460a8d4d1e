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
int64_t first_difference(const Ours& ours, const Theirs& theirs, bool with_nan) {
  std::atomic<int64_t> first{-1};
  make_thread_pool()->parallel_for(
      int64_t{1} << 32, int64_t{1} << 20, [&](int64_t begin, int64_t end) {
        for (int64_t bits = begin; bits < end; ++bits) {
          const auto x = std::bit_cast<float>(static_cast<uint32_t>(bits));
          if ((std::isnan(x) && !with_nan) || ours(x) == theirs(x)) continue;
          int64_t none = -1;
          first.compare_exchange_strong(none, bits);
          return;
        }
      });
  return first;
}

TEST(CudaCodecLong, EveryFloat) {
  EXPECT_EQ(first_difference(e2m1_from_float, cuda_e2m1, true), -1);
  EXPECT_EQ(first_difference(e4m3_from_float, cuda_e4m3, true), -1);
  EXPECT_EQ(first_difference(bf16_from_float, cuda_bf16, false), -1);
  EXPECT_EQ(first_difference(fp16_from_float, cuda_fp16, false), -1);
}

#else
NVFP4_MOE_SKIP_CUDA_TEST(CudaCodecLong)
#endif

}  // namespace
}  // namespace nvfp4_moe::internal::test
