// The precision of activation formats.
#pragma once

#include "core/config.h"

namespace nvfp4_moe::internal {

// Whether `format` is less precise than `other`: nvfp4, fp8, int8_block and bf16 are in ascending
// precision.
constexpr bool less_precise(ActivationFormat format, ActivationFormat other) {
  constexpr auto precision = [](ActivationFormat one) {
    switch (one) {
      case ActivationFormat::kNvfp4: return 0;
      case ActivationFormat::kFp8: return 1;
      case ActivationFormat::kInt8Block: return 2;
      case ActivationFormat::kBf16: break;
    }
    return 3;
  };
  return precision(format) < precision(other);
}

}  // namespace nvfp4_moe::internal
