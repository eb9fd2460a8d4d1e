// ggml's blocks against an independent implementation of their definition, element by element.
#include "gguf/blocks.h"

#include <random>

#include "gguf/gguf.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

int code_at(const std::vector<uint8_t>& codes, int64_t element) {
  const uint8_t byte = codes[static_cast<size_t>(element / 2)];
  return element % 2 == 0 ? byte & 15 : byte >> 4;
}

std::vector<uint8_t> random_bytes(size_t size) {
  std::mt19937 random(7);
  std::vector<uint8_t> out(size);
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(random());
  return out;
}

// NVFP4: four scales, then eight bytes for each sixteen elements. MXFP4: one scale, then sixteen
// bytes. A byte's low half is an element of the first half of its elements.
TEST(GgufBlocks, HaveScalesAndThenCodes) {
  using Unpack = void (*)(const uint8_t*, int64_t, uint8_t*, uint8_t*);
  const struct {
    const BlockType& type;
    Unpack unpack;
    int64_t elems, scales, per_scale, size_bytes;
  } types[] = {{*ggml_nvfp4(), unpack_nvfp4_blocks, 64, 4, 16, 36},
               {*ggml_mxfp4(), unpack_mxfp4_blocks, 32, 1, 32, 17}};
  constexpr int64_t kBlocks = 257;
  for (const auto& [type, unpack, elems, scales_per_block, per_scale, size_bytes] : types) {
    ASSERT_EQ(type.elems, elems);
    ASSERT_EQ(type.size_bytes, size_bytes);
    const std::vector<uint8_t> blocks = random_bytes(static_cast<size_t>(kBlocks * size_bytes));
    std::vector<uint8_t> codes(static_cast<size_t>(kBlocks * elems / 2));
    std::vector<uint8_t> scales(static_cast<size_t>(kBlocks * scales_per_block));
    unpack(blocks.data(), kBlocks, codes.data(), scales.data());
    for (int64_t b = 0; b < kBlocks; ++b) {
      const uint8_t* block = blocks.data() + b * size_bytes;
      for (int64_t e = 0; e < elems; ++e) {
        const int64_t group = e / per_scale, place = e % per_scale, half = per_scale / 2;
        ASSERT_EQ(scales[static_cast<size_t>(b * scales_per_block + group)], block[group]);
        const uint8_t byte = block[scales_per_block + group * half + place % half];
        ASSERT_EQ(code_at(codes, b * elems + e), place < half ? byte & 15 : byte >> 4)
            << type.name << " " << b << " " << e;
      }
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
