// Works on eight bytes at a time, since every code of a loaded expert goes through here.
#include "gguf/blocks.h"

#include <bit>
#include <cstring>

namespace nvfp4_moe::internal {
namespace {

static_assert(std::endian::native == std::endian::little,
              "byte j of a word is its bits 8j to 8j + 7");

constexpr uint64_t kLowHalves = 0x0F0F0F0F0F0F0F0F;

// Joins the low halves of eight bytes, in order, into four bytes.
uint64_t join_low_halves(uint64_t bytes) {
  uint64_t out = bytes & kLowHalves;
  out = (out | out >> 4) & 0x00FF00FF00FF00FF;
  out = (out | out >> 8) & 0x0000FFFF0000FFFF;
  return (out | out >> 16) & 0x00000000FFFFFFFF;
}

uint64_t load(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

void store(uint64_t value, uint8_t* to) { std::memcpy(to, &value, sizeof(value)); }

}  // namespace

void unpack_nvfp4_blocks(const uint8_t* blocks, int64_t count, uint8_t* codes, uint8_t* scales) {
  for (int64_t b = 0; b < count; ++b) {
    const uint8_t* block = blocks + b * 36;
    std::memcpy(scales + b * 4, block, 4);
    for (int sixteen = 0; sixteen < 4; ++sixteen) {
      const uint64_t bytes = load(block + 4 + sixteen * 8);
      store(join_low_halves(bytes) | join_low_halves(bytes >> 4) << 32,
            codes + b * 32 + sixteen * 8);
    }
  }
}

void unpack_mxfp4_blocks(const uint8_t* blocks, int64_t count, uint8_t* codes, uint8_t* scales) {
  for (int64_t b = 0; b < count; ++b) {
    const uint8_t* block = blocks + b * 17;
    scales[b] = block[0];
    const uint64_t first = load(block + 1);
    const uint64_t second = load(block + 9);
    store(join_low_halves(first) | join_low_halves(second) << 32, codes + b * 16);
    store(join_low_halves(first >> 4) | join_low_halves(second >> 4) << 32, codes + b * 16 + 8);
  }
}

}  // namespace nvfp4_moe::internal
