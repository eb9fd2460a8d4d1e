// Functions between NVFP4_MOE_TARGET_BEGIN("avx2,fma") and NVFP4_MOE_TARGET_END are compiled for
// these features.
//
// A region and not flags of a file: headers included before it keep the baseline, so that no inline
// function of the standard library is emitted with instructions that the host may lack. No lambdas
// inside: clang gives them no target.
#pragma once

#define NVFP4_MOE_PRAGMA(...) _Pragma(#__VA_ARGS__)
#if defined(__clang__)
#define NVFP4_MOE_TARGET_BEGIN(features) \
  NVFP4_MOE_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define NVFP4_MOE_TARGET_END NVFP4_MOE_PRAGMA(clang attribute pop)
#else
// The intrinsics of GCC 12 start from registers that are "undefined" on purpose, which it then
// warns of.
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
