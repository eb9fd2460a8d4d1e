// Rows of activations as operands of FP8 tensor cores: E4M3, in the order that makes wgmma with
// weights from registers cheapest. A lane of an A fragment of k32 holds k = 4q..4q+3 and the same +
// 16 (q = lane % 4). K is permuted so that a lane's 16 codes over 64 k are consecutive k, which is
// one scale block. Activations are stored in the resulting order:
//
//   in each 64 k   byte 32s + 16half + 4q + j holds k = 16q + 8s + 4half + j       s, half 0..1; q,
//                  j 0..3
//   row            64 k | 64 k | ...        k beyond the row's is 0
//
// Eight consecutive k (a vec8) are two words of four bytes, 16 bytes apart.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace nvfp4_moe::internal::cuda {

inline constexpr int kFp8KBlock = 64;
inline constexpr int64_t kFp8SecondWord = 16;  // from a vec8's first word

// Bytes of a row of k elements.
NVFP4_MOE_HOST_DEVICE constexpr int64_t fp8_row_bytes(int64_t k) {
  return (k + kFp8KBlock - 1) / kFp8KBlock * kFp8KBlock;
}
// Vec8s of a row, including padding.
NVFP4_MOE_HOST_DEVICE constexpr int64_t fp8_row_vec8s(int64_t k) { return fp8_row_bytes(k) / 8; }
// Offset within its row of vec8 i's first word.
NVFP4_MOE_HOST_DEVICE constexpr int64_t fp8_vec8_offset(int64_t vec8) {
  return vec8 / 8 * kFp8KBlock + vec8 % 2 * 32 + vec8 % 8 / 2 * 4;
}

}  // namespace nvfp4_moe::internal::cuda
