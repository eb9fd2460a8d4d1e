// Rows of activations as operands of FP4 tensor cores. A row's codes and block scales are stored
// together in k-blocks of 256, so that one copy loads both.
//
//   k-block 128 bytes of codes, low nibble the even k | 16 bytes of scales, E4M3
//   row     k-block 0 | k-block 1 | ...       k beyond the row's is code 0 under scale 0
//
// 144 bytes are 36 banks of shared memory: 16-byte reads from eight consecutive rows have no bank
// conflict, so no swizzle is needed.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace nvfp4_moe::internal::cuda {

inline constexpr int kFp4KBlock = 256;
inline constexpr int kFp4KBlockScales = kFp4KBlock / 2;  // offset of the scales
inline constexpr int kFp4KBlockBytes = kFp4KBlockScales + kFp4KBlock / 16;

// Bytes of a row of k elements.
NVFP4_MOE_HOST_DEVICE constexpr int64_t fp4_row_bytes(int64_t k) {
  return (k + kFp4KBlock - 1) / kFp4KBlock * kFp4KBlockBytes;
}
// Vec8s of a row, including padding.
NVFP4_MOE_HOST_DEVICE constexpr int64_t fp4_row_vec8s(int64_t k) {
  return (k + kFp4KBlock - 1) / kFp4KBlock * (kFp4KBlock / 8);
}
// Offset within its row of the four bytes of vec8 i's codes, and of the scale of its block of 16.
NVFP4_MOE_HOST_DEVICE constexpr int64_t fp4_codes_offset(int64_t vec8) {
  return vec8 / (kFp4KBlock / 8) * kFp4KBlockBytes + vec8 % (kFp4KBlock / 8) * 4;
}
NVFP4_MOE_HOST_DEVICE constexpr int64_t fp4_scale_offset(int64_t vec8) {
  return vec8 / (kFp4KBlock / 8) * kFp4KBlockBytes + kFp4KBlockScales + vec8 % (kFp4KBlock / 8) / 2;
}

}  // namespace nvfp4_moe::internal::cuda
