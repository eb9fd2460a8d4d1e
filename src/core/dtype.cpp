#include "core/dtype.h"

#include <array>
#include <utility>

#include "core/float_formats.h"

namespace nvfp4_moe::internal {
namespace {

constexpr std::array<std::pair<DType, const char*>, 17> kNames = {{
    {DType::kBool, "BOOL"},
    {DType::kU8, "U8"},
    {DType::kI8, "I8"},
    {DType::kU16, "U16"},
    {DType::kI16, "I16"},
    {DType::kU32, "U32"},
    {DType::kI32, "I32"},
    {DType::kU64, "U64"},
    {DType::kI64, "I64"},
    {DType::kF64, "F64"},
    {DType::kF32, "F32"},
    {DType::kF16, "F16"},
    {DType::kBf16, "BF16"},
    {DType::kF8E4M3, "F8_E4M3"},
    {DType::kF8E5M2, "F8_E5M2"},
    {DType::kF8E8M0, "F8_E8M0"},
    {DType::kF4, "F4"},
}};

}  // namespace

const char* to_string(DType dtype) {
  for (const auto& [value, name] : kNames)
    if (value == dtype) return name;
  return "?";
}

std::optional<DType> dtype_from_string(std::string_view name) {
  for (const auto& [value, text] : kNames)
    if (name == text) return value;
  return std::nullopt;
}

void to_floats(const void* values, DType dtype, int64_t count, float* out) {
  const auto* narrow = static_cast<const uint16_t*>(values);
  const auto* wide = static_cast<const float*>(values);
  for (int64_t i = 0; i < count; ++i)
    out[i] = dtype == DType::kF32    ? wide[i]
             : dtype == DType::kBf16 ? bf16_to_float(narrow[i])
                                     : fp16_to_float(narrow[i]);
}

}  // namespace nvfp4_moe::internal
