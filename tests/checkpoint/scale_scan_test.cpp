// The scan of block scales against a plain loop, at every length around its vector and chunk
// borders.
#include "checkpoint/scale_scan.h"

#include <algorithm>
#include <random>
#include <vector>

#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(ScaleScan, AgreesWithAPlainLoop) {
  std::mt19937_64 random(3);
  for (const int64_t size : {1, 63, 64, 65, 128, 64 * 255 - 1, 64 * 255, 64 * 255 * 3 + 17}) {
    for (const int fill : {0, 0x7E, -1}) {
      std::vector<uint8_t> bytes(static_cast<size_t>(size));
      for (uint8_t& byte : bytes)
        byte = static_cast<uint8_t>(fill >= 0 ? static_cast<uint64_t>(fill) : random() % 127);
      ScaleScan scan;
      scan_scales(bytes.data(), 1, size, size, scan);
      EXPECT_EQ(scan.min, std::ranges::min(bytes));
      EXPECT_EQ(scan.max, std::ranges::max(bytes));
      EXPECT_EQ(scan.saturated, static_cast<uint64_t>(std::ranges::count(bytes, 0x7E)));
      EXPECT_EQ(scan.count, static_cast<uint64_t>(size));
      // One odd byte is detected at any of several places.
      for (const int64_t at : {int64_t{0}, size / 2, size - 1}) {
        for (const uint8_t odd : {uint8_t{0x7F}, uint8_t{0x80}, uint8_t{0xFF}}) {
          std::vector<uint8_t> changed = bytes;
          changed[static_cast<size_t>(at)] = odd;
          ScaleScan other;
          scan_scales(changed.data(), 1, size, size, other);
          EXPECT_FALSE(other.valid());
          const InvalidScales invalid = find_invalid_scales(changed.data(), 1, size, size);
          EXPECT_EQ(invalid.nan, odd == 0x80 ? 0u : 1u);
          EXPECT_EQ(invalid.negative, odd == 0x80 ? 1u : 0u);
          EXPECT_EQ(invalid.first_col, at);
          EXPECT_EQ(invalid.first_byte, odd);
        }
      }
    }
  }
}

TEST(ScaleScan, RowsOfALargerMatrix) {
  std::vector<uint8_t> bytes(10 * 100, 0xFF);  // the gaps between rows are not read
  for (int r = 0; r < 10; ++r)
    std::fill_n(bytes.begin() + r * 100, 70, static_cast<uint8_t>(10 + r));
  ScaleScan scan;
  scan_scales(bytes.data(), 10, 70, 100, scan);
  EXPECT_TRUE(scan.valid());
  EXPECT_EQ(scan.min, 10);
  EXPECT_EQ(scan.max, 19);
  EXPECT_EQ(scan.count, 700u);
}

TEST(ScaleScan, PowersOfTwo) {
  for (int byte = 0; byte < 127; ++byte) {
    const auto scale = static_cast<uint8_t>(byte);
    const bool power =
        byte == 0 || byte == 1 || byte == 2 || byte == 4 || (byte >= 8 && byte % 8 == 0);
    EXPECT_EQ(all_powers_of_two(&scale, 1, 1, 1), power) << byte;
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
