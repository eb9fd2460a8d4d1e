// The number of GEMM configurations that a CUDA backend has for a format of activations.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/plain/config.h"
#include "backend/sm100/config.h"
#include "backend/sm120/config.h"
#include "backend/sm90/config.h"

namespace nvfp4_moe::internal::test {

inline int configurations_of(const Backend& backend, ActivationFormat format) {
  const bool nvfp4 = format == ActivationFormat::kNvfp4, bf16 = format == ActivationFormat::kBf16;
  if (&backend == &kSm90Backend)
    return static_cast<int>(format == ActivationFormat::kFp8 ? sm90::kFp8Configs
                                                             : sm90::kBf16Configs);
  if (&backend == &kSm100Backend)
    return static_cast<int>(bf16 ? sm100::kBf16GemmConfigs.size() : sm100::kGemmConfigs.size());
  if (&backend == &kSm120Backend && nvfp4) return static_cast<int>(sm120::kGemmConfigs.size());
  return static_cast<int>(cuda::plain::kConfigs.size());
}

}  // namespace nvfp4_moe::internal::test
