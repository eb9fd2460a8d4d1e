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

TEST(GgufBlocks, Nvfp4HasFourScalesAndThenEightBytesForEachSixteen) {
  constexpr int64_t kBlocks = 257;
  ASSERT_EQ(ggml_nvfp4()->elems, 64);
  ASSERT_EQ(ggml_nvfp4()->size_bytes, 36);
  const std::vector<uint8_t> blocks = random_bytes(kBlocks * 36);
  std::vector<uint8_t> codes(kBlocks * 32);
  std::vector<uint8_t> scales(kBlocks * 4);
  unpack_nvfp4_blocks(blocks.data(), kBlocks, codes.data(), scales.data());
  for (int64_t b = 0; b < kBlocks; ++b) {
    for (int64_t e = 0; e < 64; ++e) {
      const int64_t sixteen = e / 16;
      const int64_t place = e % 16;
      ASSERT_EQ(scales[static_cast<size_t>(b * 4 + sixteen)],
                blocks[static_cast<size_t>(b * 36 + sixteen)]);
      const uint8_t byte = blocks[static_cast<size_t>(b * 36 + 4 + sixteen * 8 + place % 8)];
      ASSERT_EQ(code_at(codes, b * 64 + e), place < 8 ? byte & 15 : byte >> 4) << b << " " << e;
    }
  }
}

TEST(GgufBlocks, Mxfp4HasOneScaleAndThenSixteenBytes) {
  constexpr int64_t kBlocks = 257;
  ASSERT_EQ(ggml_mxfp4()->elems, 32);
  ASSERT_EQ(ggml_mxfp4()->size_bytes, 17);
  const std::vector<uint8_t> blocks = random_bytes(kBlocks * 17);
  std::vector<uint8_t> codes(kBlocks * 16);
  std::vector<uint8_t> scales(kBlocks);
  unpack_mxfp4_blocks(blocks.data(), kBlocks, codes.data(), scales.data());
  for (int64_t b = 0; b < kBlocks; ++b) {
    ASSERT_EQ(scales[static_cast<size_t>(b)], blocks[static_cast<size_t>(b * 17)]);
    for (int64_t e = 0; e < 32; ++e) {
      const uint8_t byte = blocks[static_cast<size_t>(b * 17 + 1 + e % 16)];
      ASSERT_EQ(code_at(codes, b * 32 + e), e < 16 ? byte & 15 : byte >> 4) << b << " " << e;
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
