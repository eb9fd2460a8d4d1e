// The form in which an architecture's GEMMs read quantized activations. Under bf16 activations they
// read the rows as they are.
#pragma once

#include <cstdint>

#include "backend/cuda/fp4_operand.h"
#include "backend/cuda/fp8_operand.h"
#include "core/config.h"
#include "core/host_device.h"

namespace nvfp4_moe::internal::cuda {

enum class Operand : uint8_t {
  kBf16,  // the values of codes and block scales, without the row's scale: exact
  kFp4,   // codes and block scales (fp4_operand.h)
  kE4m3,  // codes, in the order of fp8_operand.h
};

// An architecture's operands by the layer's activation format.
struct Operands {
  Operand nvfp4 = Operand::kBf16, fp8 = Operand::kBf16;
  constexpr Operand of(ActivationFormat format) const {
    return format == ActivationFormat::kNvfp4 ? nvfp4
           : format == ActivationFormat::kFp8 ? fp8
                                              : Operand::kBf16;
  }
};

// Whether rows are quantized: they have a row scale, and operands that are separate from the arrays
// of the contract.
constexpr bool quantizes(ActivationFormat format) {
  return format == ActivationFormat::kNvfp4 || format == ActivationFormat::kFp8;
}

// Bytes of an operand row of k elements.
NVFP4_MOE_HOST_DEVICE constexpr int64_t operand_row_bytes(Operand operand, int64_t k) {
  return operand == Operand::kFp4    ? fp4_row_bytes(k)
         : operand == Operand::kE4m3 ? fp8_row_bytes(k)
                                     : k * 2;
}
// Vec8s of an operand row, including padding.
NVFP4_MOE_HOST_DEVICE constexpr int64_t operand_row_vec8s(Operand operand, int64_t k) {
  return operand == Operand::kFp4    ? fp4_row_vec8s(k)
         : operand == Operand::kE4m3 ? fp8_row_vec8s(k)
                                     : k / 8;
}

}  // namespace nvfp4_moe::internal::cuda
