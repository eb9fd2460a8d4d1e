// The recorder itself, without a device: a recording matches the same results and nothing else.
#include "support/recording.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

namespace nvfp4_moe::internal::test {
namespace {

using testing::HasSubstr;

constexpr LayerLimits kLimits{0.999, 1e-2, 1e-2, 1e-1};

std::vector<uint8_t> bytes() {
  std::vector<uint8_t> all(40 * 6);
  std::iota(all.begin(), all.end(), uint8_t{0});
  return all;
}
std::vector<float> values() {
  std::vector<float> all;
  for (int i = 0; i < 4 * 8; ++i) all.push_back(std::sin(static_cast<float>(i)));
  return all;
}
// 1.0, its neighbours, zeros of both signs and NaN.
const std::vector<uint16_t> kExpected = {0x3F80, 0x3F80, 0x3F80, 0x0000, 0x8000, 0x7FC0};
const std::vector<uint16_t> kRounded = {0x3F80, 0x3F81, 0x3F7F, 0x8000, 0x0000, 0xFFC0};

TEST(Recording, MatchesTheSameResultsAndNothingElse) {
  const auto writer = Recording::writer("a GPU");
  EXPECT_EQ(writer->bits("rows", bytes(), 6), "");
  EXPECT_EQ(writer->values("layer", values(), 8, kLimits), "");
  EXPECT_EQ(writer->roundings("gemm1", kExpected, kRounded), "");
  const auto reader = Recording::reader(writer->json());
  EXPECT_EQ(reader->bits("rows", bytes(), 6), "");
  EXPECT_EQ(reader->values("layer", values(), 8, kLimits), "");
  EXPECT_EQ(reader->roundings("gemm1", kExpected, kRounded), "");
  EXPECT_EQ(reader->rounded_otherwise(), 0);

  std::vector<uint8_t> other = bytes();
  other[6 * 17 + 5] ^= 1;  // 40 rows have 16 digests
  EXPECT_EQ(reader->bits("rows", other, 6), "rows: rows 17 to 19 are not those of a GPU");
  EXPECT_THAT(reader->bits("rows", std::vector<uint8_t>(41 * 6), 6), HasSubstr("other sizes"));
  EXPECT_THAT(reader->bits("unknown", bytes(), 6), HasSubstr("not in the recording"));

  for (const float change : {0.5f, NAN}) {
    std::vector<float> far = values();
    far[9] += change;
    EXPECT_NE(reader->values("layer", far, 8, kLimits), "");
  }

  EXPECT_EQ(reader->roundings("gemm1", kExpected, kExpected), "");
  EXPECT_EQ(reader->rounded_otherwise(), 2);
  std::vector<uint16_t> steps = kExpected;
  steps[0] = 0x3F82;
  EXPECT_THAT(reader->roundings("gemm1", kExpected, steps), HasSubstr("element 0 is 2 steps"));
  steps[0] = kExpected[0];
  steps[1] = 0x3F7F;  // one step from the expected value, two from the recorded one
  EXPECT_THAT(reader->roundings("gemm1", kExpected, steps), HasSubstr("two steps"));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
