#include "gguf/blocks.h"

#include <cstring>

namespace nvfp4_moe {
namespace {

// from (kBytes): elements j (low) and j + kBytes (high). to (kBytes): elements 2j (low) and 2j + 1 (high).
template <int kBytes>
void straighten(const uint8_t* from, uint8_t* to) {
  constexpr int kHalf = kBytes / 2;
  for (int j = 0; j < kHalf; ++j) {
    const uint8_t even = from[2 * j];
    const uint8_t odd = from[2 * j + 1];
    to[j] = static_cast<uint8_t>((even & 0x0F) | (odd << 4));
    to[j + kHalf] = static_cast<uint8_t>((even >> 4) | (odd & 0xF0));
  }
}

}  // namespace

void unpack_nvfp4_blocks(const uint8_t* blocks, int64_t count, uint8_t* codes, uint8_t* scales) {
  for (int64_t b = 0; b < count; ++b) {
    const uint8_t* block = blocks + b * 36;
    std::memcpy(scales + b * 4, block, 4);
    for (int s = 0; s < 4; ++s) straighten<8>(block + 4 + s * 8, codes + b * 32 + s * 8);
  }
}

void unpack_mxfp4_blocks(const uint8_t* blocks, int64_t count, uint8_t* codes, uint8_t* scales) {
  for (int64_t b = 0; b < count; ++b) {
    const uint8_t* block = blocks + b * 17;
    scales[b] = block[0];
    straighten<16>(block + 1, codes + b * 16);
  }
}

}  // namespace nvfp4_moe
