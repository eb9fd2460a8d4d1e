// NVIDIA's own conversions as an oracle: the host code of cuda_fp4.h, cuda_fp8.h, cuda_bf16.h and
// cuda_fp16.h, which needs no CUDA runtime and no GPU. Without the headers the tests are reported
// as skipped.
#pragma once

#if __has_include(<cuda_fp4.h>)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#define NVFP4_MOE_HAS_CUDA_HEADERS 1

namespace nvfp4_moe::internal::test {

inline unsigned cuda_e2m1(float x) { return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
inline unsigned cuda_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
inline unsigned cuda_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
inline unsigned cuda_fp16(float x) { return __half_as_ushort(__float2half_rn(x)); }

}  // namespace nvfp4_moe::internal::test
#else
#define NVFP4_MOE_HAS_CUDA_HEADERS 0
#define NVFP4_MOE_SKIP_CUDA_TEST(suite) \
  TEST(suite, All) { GTEST_SKIP() << "cuda_fp4.h not found: set NVFP4_MOE_CUDA_INCLUDE_DIR"; }
#endif
