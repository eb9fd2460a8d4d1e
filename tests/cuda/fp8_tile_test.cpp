// The packed tiles for products of E4M3, on a host.
#include "backend/sm90/fp8_tile.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <set>

#include "core/float_formats.h"
#include "core/fp8.h"
#include "core/random.h"

namespace nvfp4_moe::internal::sm90 {
namespace {

TEST(Fp8Tile, EveryWordComesBack) {
  Random random(3);
  for (int i = 0; i < 100000; ++i) {
    const auto codes = static_cast<uint32_t>(random.below(1ull << 32));
    ASSERT_EQ(unpack_fp8_word(pack_fp8_word(codes)), codes);
  }
  for (int bit = 0; bit < 32; ++bit) ASSERT_EQ(std::popcount(pack_fp8_word(1u << bit)), 1);
}

// Each (scale, shift) that a matrix can have: the shift that its largest scale sets, with all
// scales up to that one.
template <class Body>
void for_each_scale(const Body& body) {
  for (int largest = 0; largest < 0x7F; ++largest) {
    const int shift = fp8_weight_shift(static_cast<uint8_t>(largest));
    for (int byte = 0; byte <= largest; ++byte) body(static_cast<uint8_t>(byte), shift);
  }
}

TEST(Fp8Tile, ScalesComeBackWhateverTheShift) {
  for_each_scale([](uint8_t byte, int shift) {
    const uint32_t index = fp8_scale_index(byte, shift);
    ASSERT_LT(index, static_cast<uint32_t>(kFp8ScaleIndices));
    ASSERT_EQ(fp8_scale_byte(index, shift), byte) << shift;
    if (byte == 0) return;
    ASSERT_GE(index, 8u);
    ASSERT_EQ(std::ldexp(double{std::bit_cast<float>(fp8_scale_bits(index))}, shift),
              double{e4m3_to_float(byte)});
  });
}

// Fp8Products::dequantize with PRMT computed by hand.
std::array<uint8_t, 8> picked(const std::array<uint8_t, 8>& magnitudes, uint32_t word) {
  std::array<uint8_t, 8> bytes{};
  for (int i = 0; i < 8; ++i) {
    const uint32_t signs = i < 4 ? word & 0x80808080u : word << 4 & 0x80808080u;
    bytes[static_cast<size_t>(i)] =
        static_cast<uint8_t>(magnitudes[word >> (4 * i) & 7] | (signs >> (8 * (i % 4)) & 0xFF));
  }
  return bytes;
}

TEST(Fp8Tile, PicksAreTheWeights) {
  Random random(5);
  for_each_scale([&](uint8_t byte, int shift) {
    const uint32_t index = fp8_scale_index(byte, shift);
    const double scale = index == 0 ? 0 : double{std::bit_cast<float>(fp8_scale_bits(index))};
    std::array<uint8_t, 8> magnitudes{};
    for (size_t m = 0; m < 8; ++m)
      magnitudes[m] = e4m3_from_double(double{e2m1_to_float(static_cast<uint8_t>(m))} * scale);
    const auto codes = static_cast<uint32_t>(random.below(1ull << 32));
    const auto bytes = picked(magnitudes, pack_fp8_word(codes));
    for (int i = 0; i < 8; ++i)
      ASSERT_EQ(bytes[static_cast<size_t>(i)],
                fp8_weight(static_cast<uint8_t>(codes >> (4 * i) & 15), byte, shift))
          << "scale " << int{byte} << " shift " << shift << " code " << (codes >> (4 * i) & 15);
  });
}

// Lanes' scales fill the part of a tile that has no codes, without gap or overlap.
TEST(Fp8Tile, ScalesCoverTheirPart) {
  std::set<int> starts;
  for (int group = 0; group < cuda::kGroups; ++group)
    for (int half = 0; half < cuda::kHalves; ++half)
      for (int lane = 0; lane < 32; ++lane) {
        const int at = fp8_scales_offset(group, half, lane);
        EXPECT_TRUE(at >= cuda::kTileCodeBytes && at + 2 <= cuda::kTileBytes && at % 2 == 0);
        EXPECT_TRUE(starts.insert(at).second);
      }
  EXPECT_EQ(static_cast<int64_t>(starts.size()) * 2, cuda::kTileScaleBytes);
}

}  // namespace
}  // namespace nvfp4_moe::internal::sm90
