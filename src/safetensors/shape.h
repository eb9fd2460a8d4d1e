// Bytes of a tensor from dtype and shape, in checked arithmetic. Shared by reader and writer.
#pragma once

#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

inline constexpr uint64_t kMaxTensorNameBytes = 4096;
inline constexpr uint64_t kMaxTensors = uint64_t{1} << 20;  // of one file
inline constexpr uint64_t kMaxRank = 32;
inline constexpr uint64_t kMaxHeaderBytes = uint64_t{100} << 20;  // limit of this reader
// limit of every other reader
inline constexpr uint64_t kMaxWrittenHeaderBytes = uint64_t{100'000'000};

// Refuses a negative dimension, a product of the nonzero dimensions (so that strides cannot
// overflow either) of more than 2^63 - 1 bits, an odd number of F4 elements, and more than kMaxRank
// dimensions. The message has no tensor name.
Result<uint64_t> tensor_bytes(DType dtype, std::span<const int64_t> shape);

}  // namespace nvfp4_moe::internal
