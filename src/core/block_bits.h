// Helpers of core's quantizers: magnitudes as ordered bits, and a block's codes as packed bytes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/float_formats.h"

namespace nvfp4_moe::internal {

inline constexpr uint32_t kInfBits = 0x7F800000u;

// |x| as ordered bits: finite < Inf < NaN.
inline uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu; }

inline uint32_t max_magnitude_bits(const float* x, int64_t count) {
  int32_t amax = 0;  // signed, since baseline x86-64 vectors compare only signed integers
  for (int64_t i = 0; i < count; ++i)
    amax = std::max(amax, static_cast<int32_t>(magnitude_bits(x[i])));
  return static_cast<uint32_t>(amax);
}

inline void pack_block(const uint8_t* codes16, uint8_t* packed) {
  for (int i = 0; i < kBlockElems / 2; ++i)
    packed[i] = pack_codes(codes16[2 * i], codes16[2 * i + 1]);
}

}  // namespace nvfp4_moe::internal
