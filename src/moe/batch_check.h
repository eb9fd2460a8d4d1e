// Checks that layers and linears share: pointers, sizes and dtypes of a call's arrays. They never
// read the arrays.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// One array of a call: count elements of dtype at data.
struct Array {
  const char* name;
  const void* data;
  DType dtype;
  int64_t count;

  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
  uintptr_t end() const {
    return begin() + static_cast<uintptr_t>(count) * static_cast<uintptr_t>(bits(dtype) / 8);
  }
};

Status check_array(const Array& array);  // not null, aligned to its elements, inside memory
Status check_apart(const Array& written, const Array& other);  // no byte in common
Status check_activation_dtype(const char* name, DType dtype);  // BF16, F16 or F32
Status check_tokens(int64_t tokens, int64_t max_tokens);
// forked: the object is on a GPU, and this process was forked from the one that opened it. Then
// kUnsupported.
Status check_forked(const char* what, bool forked);

}  // namespace nvfp4_moe::internal
