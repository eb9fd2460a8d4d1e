// DType: the element types of the library's inputs and outputs (activations, ids, checkpoint
// tensors).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace nvfp4_moe::internal {

enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kF64,
  kF32,
  kF16,
  kBf16,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kF4,  // two E2M1 elements per byte; a safetensors F4 shape counts elements
};

// Bits per element: 4 for kF4, 8 per byte otherwise.
constexpr int bits(DType dtype) {
  switch (dtype) {
    case DType::kF4: return 4;
    case DType::kBool:
    case DType::kU8:
    case DType::kI8:
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kF8E8M0: return 8;
    case DType::kU16:
    case DType::kI16:
    case DType::kF16:
    case DType::kBf16: return 16;
    case DType::kU32:
    case DType::kI32:
    case DType::kF32: return 32;
    case DType::kU64:
    case DType::kI64:
    case DType::kF64: return 64;
  }
  return 0;
}

constexpr bool is_activation(DType dtype) {
  return dtype == DType::kBf16 || dtype == DType::kF16 || dtype == DType::kF32;
}

// Bits of the smallest fp32 magnitude that an activation dtype stores as Inf: half a step beyond
// the largest finite number, since rounding is to nearest even. NaN's bits are larger, too.
constexpr uint32_t overflow_bits(DType dtype) {
  switch (dtype) {
    case DType::kF16: return 0x477FF000u;   // 65520
    case DType::kBf16: return 0x7F7F8000u;  // 2^128 - 2^119
    default: return 0x7F800000u;            // Inf itself
  }
}

// out[i] = values[i] of an array of an activation dtype.
void to_floats(const void* values, DType dtype, int64_t count, float* out);

// The safetensors spelling: "F32", "BF16", "F8_E4M3", "F4", ...
const char* to_string(DType dtype);
std::optional<DType> dtype_from_string(std::string_view name);

}  // namespace nvfp4_moe::internal
