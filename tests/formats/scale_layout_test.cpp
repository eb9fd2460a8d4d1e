// The 128x4 layout: a bijection with zero padding, both ways, and per-expert bases that never
// overlap.
#include "core/scale_layout.h"

#include <algorithm>
#include <random>

#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

struct Shape {
  int64_t rows, scale_cols;
};
constexpr Shape kShapes[] = {{1, 1},    {1, 4},    {128, 4},  {127, 3}, {129, 5},
                             {128, 1},  {256, 8},  {300, 7},  {1, 448}, {513, 12},
                             {31, 192}, {384, 48}, {1000, 13}};

// The layout built as nested boxes, instead of by shifts: tile row, tile column, row % 32, row / 32
// % 4, column % 4. So it is a bijection onto the padded matrix.
TEST(ScaleLayout, MatchesItsPicture) {
  for (const auto& [rows, cols] : kShapes) {
    int64_t offset = 0;
    for (int64_t tile_row = 0; tile_row < rows; tile_row += 128)
      for (int64_t tile_col = 0; tile_col < cols; tile_col += 4)
        for (int64_t line = 0; line < 32; ++line)
          for (int64_t group = 0; group < 4; ++group)
            for (int64_t col = 0; col < 4; ++col)
              ASSERT_EQ(swizzled_scale_offset(tile_row + group * 32 + line, tile_col + col, cols),
                        offset++);
    EXPECT_EQ(offset, swizzled_scale_bytes(rows, cols));
    EXPECT_EQ(offset, round_up(rows, 128) * round_up(cols, 4));
  }
}

TEST(ScaleLayout, SwizzleAndBackWithStridesAndZeroPadding) {
  std::mt19937 random(1);
  for (const auto& [rows, cols] : kShapes) {
    for (const int64_t slack : {0, 5}) {
      const int64_t stride = cols + slack;
      std::vector<uint8_t> linear(static_cast<size_t>(rows * stride));
      for (uint8_t& byte : linear) byte = static_cast<uint8_t>(random() % 126 + 1);
      const auto size = static_cast<size_t>(swizzled_scale_bytes(rows, cols));
      std::vector<uint8_t> swizzled(size + 1, 0xEE);
      swizzle_scales(linear.data(), stride, rows, cols, swizzled.data());
      EXPECT_EQ(swizzled[size], 0xEE) << "nothing after the end";
      EXPECT_EQ(std::count(swizzled.begin(), swizzled.end() - 1, 0),
                static_cast<int64_t>(size) - rows * cols)
          << "padding is zero";
      std::vector<uint8_t> back(linear.size(), 0xDD);
      unswizzle_scales(swizzled.data(), rows, cols, back.data(), stride);
      for (int64_t m = 0; m < rows; ++m)
        for (int64_t k = 0; k < stride; ++k) {
          const auto i = static_cast<size_t>(m * stride + k);
          ASSERT_EQ(back[i], k < cols ? linear[i] : 0xDD);
          if (k < cols) {
            ASSERT_EQ(swizzled[static_cast<size_t>(swizzled_scale_offset(m, k, cols))], linear[i]);
          }
        }
    }
  }
}

// `rows` rows over `experts` experts, skewed at random: empty experts, one expert with everything,
// even shares.
std::vector<int64_t> random_offsets(std::mt19937& random, int64_t experts, int64_t rows) {
  std::vector<int64_t> offsets(static_cast<size_t>(experts) + 1, 0);
  const int kind = static_cast<int>(random() % 3);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t e = kind == 0   ? static_cast<int64_t>(random()) % experts
                      : kind == 1 ? experts / 2
                                  : static_cast<int64_t>(random()) %
                                        (1 + static_cast<int64_t>(random()) % experts);
    ++offsets[static_cast<size_t>(e) + 1];
  }
  for (size_t e = 0; e < static_cast<size_t>(experts); ++e) offsets[e + 1] += offsets[e];
  return offsets;
}

TEST(ExpertScaleRows, SwizzlePutsEveryRowInItsExpertsSlot) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t experts = 1 + static_cast<int64_t>(random() % (trial < 100 ? 9 : 64));
    const int64_t rows = static_cast<int64_t>(random() % 600);
    const int64_t cols = 1 + static_cast<int64_t>(random() % 9);
    const std::vector<int64_t> offsets = random_offsets(random, experts, rows);
    std::vector<uint8_t> linear(static_cast<size_t>(rows * cols));
    for (uint8_t& byte : linear) byte = static_cast<uint8_t>(random() % 126 + 1);
    const int64_t bound = expert_scale_rows_bound(rows, experts);
    std::vector<uint8_t> swizzled(static_cast<size_t>(swizzled_scale_bytes(bound, cols)), 0xEE);
    swizzle_expert_scales(linear.data(), offsets.data(), experts, cols, swizzled.data());
    EXPECT_EQ(std::count(swizzled.begin(), swizzled.end(), 0),
              static_cast<int64_t>(swizzled.size()) - rows * cols);
    int64_t end = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t first = offsets[static_cast<size_t>(e)];
      const int64_t count = offsets[static_cast<size_t>(e) + 1] - first;
      const int64_t base = expert_scale_row(first, e);
      EXPECT_EQ(base % 128, 0);
      ASSERT_GE(base, end) << "expert " << e;
      end = round_up(base + count, 128);  // whole tiles: the padding holds no other expert's rows
      if (count == 0) continue;
      // The expert's slot, found at its base, is the plain swizzle of its own rows.
      std::vector<uint8_t> own(static_cast<size_t>(swizzled_scale_bytes(count, cols)));
      swizzle_scales(linear.data() + first * cols, cols, count, cols, own.data());
      ASSERT_TRUE(std::equal(own.begin(), own.end(), swizzled.begin() + base * round_up(cols, 4)))
          << "expert " << e;
    }
    ASSERT_LE(end, bound);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
