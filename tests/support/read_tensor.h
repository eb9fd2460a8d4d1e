// Reads a tensor's values like the library.
#pragma once

#include <cstddef>
#include <vector>

#include "safetensors/safetensors.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

// The tensor's bytes as an array of T.
template <class T = std::byte>
std::vector<T> read_tensor(const TensorFile& file, const TensorInfo& info) {
  std::vector<T> values(info.size_bytes() / sizeof(T));
  EXPECT_OK(file.read(file.offset(info), values.data(), values.size() * sizeof(T)));
  return values;
}

}  // namespace nvfp4_moe::internal::test
