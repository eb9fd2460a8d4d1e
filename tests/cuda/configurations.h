// The number of GEMM configurations that a CUDA backend has for a format of activations.
#pragma once

#include "backend/backend.h"

namespace nvfp4_moe::internal::test {

inline int configurations_of(const Backend& backend, ActivationFormat format) {
  return static_cast<int>(backend.gemm_tile_rows(format).size());
}

}  // namespace nvfp4_moe::internal::test
