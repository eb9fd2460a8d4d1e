// NVIDIA's own conversions as an oracle: the host code of cuda_fp4.h, cuda_fp8.h, cuda_bf16.h and
// cuda_fp16.h, which needs no CUDA runtime and no GPU. Without the headers each test is reported as
// skipped, by name.
#pragma once

#if __has_include(<cuda_fp4.h>)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#define NVFP4_MOE_HAS_CUDA_HEADERS 1
#else
#define NVFP4_MOE_HAS_CUDA_HEADERS 0
#define NVFP4_MOE_SKIP_CUDA_TEST(suite, name) \
  TEST(suite, name) { GTEST_SKIP() << "cuda_fp4.h not found: set NVFP4_MOE_CUDA_INCLUDE_DIR"; }
#endif
