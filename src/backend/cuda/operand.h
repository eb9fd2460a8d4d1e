// What an architecture's GEMMs take of quantized activations. Under bf16 activations they take the
// rows as they are.
#pragma once

#include <cstdint>

#include "backend/cuda/fp4_operand.h"
#include "backend/cuda/fp8_operand.h"
#include "core/config.h"
#include "core/host_device.h"

namespace nvfp4_moe::internal::cuda {

enum class Operand : uint8_t {
  kBf16,  // the values that codes and block scales stand for, without the row's scale: exact
  kFp4,   // codes and block scales (fp4_operand.h)
  kE4m3,  // codes, in the order of fp8_operand.h
};

// Of an architecture, by the layer's activation format.
struct Operands {
  Operand nvfp4 = Operand::kBf16, fp8 = Operand::kBf16;
  constexpr Operand of(ActivationFormat format) const {
    return format == ActivationFormat::kNvfp4 ? nvfp4
           : format == ActivationFormat::kFp8 ? fp8
                                              : Operand::kBf16;
  }
};

// Whether rows are quantized: they have a scale of their own, and operands apart from the arrays of
// the contract.
constexpr bool quantizes(ActivationFormat format) {
  return format == ActivationFormat::kNvfp4 || format == ActivationFormat::kFp8;
}

// Of one row of an operand, k elements.
NVFP4_MOE_HOST_DEVICE constexpr int64_t operand_row_bytes(Operand operand, int64_t k) {
  return operand == Operand::kFp4    ? fp4_row_bytes(k)
         : operand == Operand::kE4m3 ? fp8_row_bytes(k)
                                     : k * 2;
}
// Vec8s of one, padding included.
NVFP4_MOE_HOST_DEVICE constexpr int64_t operand_row_vec8s(Operand operand, int64_t k) {
  return operand == Operand::kFp4    ? fp4_row_vec8s(k)
         : operand == Operand::kE4m3 ? fp8_row_vec8s(k)
                                     : k / 8;
}

}  // namespace nvfp4_moe::internal::cuda
