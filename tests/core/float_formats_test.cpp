// The codecs against lists of representable values (formats/grid.h).
#include "core/float_formats.h"

#include <cmath>
#include <limits>

#include "formats/grid.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr double kDoubleInf = std::numeric_limits<double>::infinity();
constexpr float kFloatInf = std::numeric_limits<float>::infinity();

struct Format {
  const char* name;
  const Grid& grid;
  unsigned sign;  // bit
  unsigned (*from_float)(float);
  unsigned (*from_double)(double);
  double (*decode)(unsigned);
};

std::vector<Format> formats() {
  return {
      {"e2m1", e2m1_grid(), 8, [](float x) -> unsigned { return e2m1_from_float(x); },
       [](double x) -> unsigned { return e2m1_from_double(x); },
       [](unsigned c) -> double { return e2m1_to_float(static_cast<uint8_t>(c)); }},
      {"e4m3", e4m3_grid(), 0x80, [](float x) -> unsigned { return e4m3_from_float(x); },
       [](double x) -> unsigned { return e4m3_from_double(x); },
       [](unsigned c) -> double { return e4m3_to_float(static_cast<uint8_t>(c)); }},
      {"bf16", bf16_grid(), 0x8000, [](float x) -> unsigned { return bf16_from_float(x); },
       [](double x) -> unsigned { return bf16_from_double(x); },
       [](unsigned c) -> double { return bf16_to_float(static_cast<uint16_t>(c)); }},
      {"fp16", fp16_grid(), 0x8000, [](float x) -> unsigned { return fp16_from_float(x); },
       [](double x) -> unsigned { return fp16_from_double(x); },
       [](unsigned c) -> double { return fp16_to_float(static_cast<uint16_t>(c)); }},
  };
}

TEST(FloatFormats, EveryFiniteValueDecodesAndComesBack) {
  for (const Format& f : formats()) {
    for (size_t i = 0; i <= f.grid.max_index(); ++i) {
      const double value = f.grid.magnitudes[i];
      for (const bool negative : {false, true}) {
        const auto bits = static_cast<unsigned>(i) | (negative ? f.sign : 0);
        const double decoded = f.decode(bits);
        ASSERT_EQ(decoded, negative ? -value : value) << f.name << " " << bits;
        ASSERT_EQ(std::signbit(decoded), negative) << f.name << " " << bits;
        ASSERT_EQ(f.from_float(static_cast<float>(decoded)), bits) << f.name;
        ASSERT_EQ(f.from_double(decoded), bits) << f.name;
      }
    }
  }
}

TEST(FloatFormats, EveryBoundaryRoundsToEvenAndItsNeighboursAwayFromIt) {
  for (const Format& f : formats()) {
    for (size_t i = 0; i < f.grid.max_index() + (f.grid.saturates ? 0 : 1); ++i) {
      // Its neighbours are doubles that float would round onto the boundary: rounding twice would
      // then go to even.
      const double mid = f.grid.midpoint(i);
      const auto even = static_cast<unsigned>(i + i % 2);
      const auto lower = static_cast<unsigned>(i);
      for (const unsigned sign : {0u, f.sign}) {
        const double s = sign != 0 ? -1 : 1;
        ASSERT_EQ(f.from_double(s * mid), even | sign) << f.name << " boundary " << i;
        for (const double above : {std::nextafter(mid, kDoubleInf), mid * (1 + 0x1p-25)})
          ASSERT_EQ(f.from_double(s * above), (lower + 1) | sign) << f.name << " boundary " << i;
        for (const double below : {std::nextafter(mid, 0.0), mid * (1 - 0x1p-25)})
          ASSERT_EQ(f.from_double(s * below), lower | sign) << f.name << " boundary " << i;
        const auto float_mid = static_cast<float>(mid);
        ASSERT_EQ(static_cast<double>(float_mid), mid);
        ASSERT_EQ(f.from_float(static_cast<float>(s) * float_mid), even | sign)
            << f.name << " boundary " << i;
        ASSERT_EQ(f.from_float(static_cast<float>(s) * std::nextafter(float_mid, kFloatInf)),
                  (lower + 1) | sign);
        ASSERT_EQ(f.from_float(static_cast<float>(s) * std::nextafter(float_mid, 0.0f)),
                  lower | sign);
      }
    }
  }
}

TEST(FloatFormats, InfinityOverflowAndUnderflow) {
  const double large[] = {kDoubleInf, 1e300, 0x1p128};
  for (const Format& f : formats()) {
    const unsigned largest = static_cast<unsigned>(f.grid.max_index()) + (f.grid.saturates ? 0 : 1);
    EXPECT_EQ(f.from_float(kFloatInf), largest) << f.name;
    EXPECT_EQ(f.from_float(-kFloatInf), largest | f.sign) << f.name;
    for (const double x : large) {
      EXPECT_EQ(f.from_double(x), largest) << f.name << " " << x;
      EXPECT_EQ(f.from_double(-x), largest | f.sign) << f.name << " " << x;
    }
    EXPECT_EQ(f.from_float(-0.0f), f.sign) << f.name;
    EXPECT_EQ(f.from_double(-0.0), f.sign) << f.name;
    EXPECT_EQ(f.from_double(-1e-310), f.sign) << f.name;
    EXPECT_EQ(f.from_double(1e-300), 0u) << f.name;
  }
  EXPECT_EQ(e4m3_from_float(465.0f), 0x7E);  // torch's cast gives NaN here
  EXPECT_EQ(fp16_to_float(0x7C00), kFloatInf);
  EXPECT_EQ(fp16_to_float(0xFC00), -kFloatInf);
  EXPECT_EQ(bf16_to_float(0xFF80), -kFloatInf);
}

TEST(FloatFormats, NanGoesWhereTheHeaderSays) {
  for (const uint32_t bits :
       {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFC00000u, 0xFFFFFFFFu}) {
    const auto nan = std::bit_cast<float>(bits);
    EXPECT_EQ(e2m1_from_float(nan), 0x7);
    EXPECT_EQ(e4m3_from_float(nan), 0x7F);
    const uint16_t bf16 = bf16_from_float(nan);
    EXPECT_TRUE(std::isnan(bf16_to_float(bf16)));
    EXPECT_NE(bf16 & 0x40, 0) << "quiet";
    const uint16_t fp16 = fp16_from_float(nan);
    EXPECT_TRUE(std::isnan(fp16_to_float(fp16)));
    EXPECT_NE(fp16 & 0x200, 0) << "quiet";
  }
  for (const double nan : {std::nan(""), -std::nan("")}) {
    EXPECT_EQ(e2m1_from_double(nan), 0x7);
    EXPECT_EQ(e4m3_from_double(nan), 0x7F);
    EXPECT_TRUE(std::isnan(bf16_to_float(bf16_from_double(nan))));
    EXPECT_TRUE(std::isnan(fp16_to_float(fp16_from_double(nan))));
  }
  EXPECT_TRUE(std::isnan(e4m3_to_float(0x7F)));
  EXPECT_TRUE(std::isnan(e4m3_to_float(0xFF)));
  for (unsigned mantissa = 1; mantissa < 0x400; ++mantissa)
    EXPECT_TRUE(std::isnan(fp16_to_float(static_cast<uint16_t>(0x7C00 | mantissa))));
}

TEST(FloatFormats, PackAndUnpackAllBytes) {
  for (unsigned byte = 0; byte < 256; ++byte) {
    const auto b = static_cast<uint8_t>(byte);
    EXPECT_EQ(low_code(b), byte % 16);
    EXPECT_EQ(high_code(b), byte / 16);
    EXPECT_EQ(pack_codes(low_code(b), high_code(b)), b);
    EXPECT_EQ(is_valid_block_scale(b), byte <= 126);
    EXPECT_EQ(e2m1_to_float(b), e2m1_to_float(low_code(b)));
  }
  // The even element is in the low nibble: 1.0 is code 2, -6.0 is code 15.
  EXPECT_EQ(pack_codes(e2m1_from_float(1.0f), e2m1_from_float(-6.0f)), 0xF2);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
