// Converts NVFP4 and MXFP4 from ggml's storage to this library's codes and block scales. Exact:
// bytes are moved, no value is rounded.
//
// ggml stores a block's scales next to its codes, and the codes of n elements as n/2 bytes. Byte j
// has element j in the low half and element j + n/2 in the high one (n = 16 for NVFP4, 32 for
// MXFP4). Here byte j has elements 2j and 2j + 1.
//
//   NVFP4, 64 elements in 36 bytes:  4 scales (E4M3, one per 16), 4 x 8 bytes of codes
//   MXFP4, 32 elements in 17 bytes:  1 scale (E8M0), 16 bytes of codes
#pragma once

#include <cstdint>

namespace nvfp4_moe::internal {

// blocks (count * 36) -> codes (count * 32), scales (count * 4).
void unpack_nvfp4_blocks(const uint8_t* blocks, int64_t count, uint8_t* codes, uint8_t* scales);

// blocks (count * 17) -> codes (count * 16), scales (count).
void unpack_mxfp4_blocks(const uint8_t* blocks, int64_t count, uint8_t* codes, uint8_t* scales);

}  // namespace nvfp4_moe::internal
