// Compiles the functions between NVFP4_MOE_TARGET_BEGIN("avx2,fma") and NVFP4_MOE_TARGET_END for
// these features.
//
// A region, not flags of a file: headers included before it keep the baseline, so that no inline
// function of the standard library contains instructions that the host may lack. No lambdas inside:
// clang does not apply the target to them.
#pragma once

#define NVFP4_MOE_PRAGMA(...) _Pragma(#__VA_ARGS__)
#if defined(__clang__)
#define NVFP4_MOE_TARGET_BEGIN(features) \
  NVFP4_MOE_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define NVFP4_MOE_TARGET_END NVFP4_MOE_PRAGMA(clang attribute pop)
#else
// GCC 12's intrinsics start from registers that are "undefined" on purpose, and GCC warns about
// that.
#define NVFP4_MOE_TARGET_BEGIN(features)                           \
  NVFP4_MOE_PRAGMA(GCC diagnostic push)                            \
  NVFP4_MOE_PRAGMA(GCC diagnostic ignored "-Wmaybe-uninitialized") \
  NVFP4_MOE_PRAGMA(GCC diagnostic ignored "-Wuninitialized")       \
  NVFP4_MOE_PRAGMA(GCC push_options)                               \
  NVFP4_MOE_PRAGMA(GCC target(features))
#define NVFP4_MOE_TARGET_END        \
  NVFP4_MOE_PRAGMA(GCC pop_options) \
  NVFP4_MOE_PRAGMA(GCC diagnostic pop)
#endif
