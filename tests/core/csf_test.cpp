// CSF against its definition: round trips of any bytes, the encoder's choice of a base, and streams
// that no encoder writes.
#include "core/csf.h"

#include <algorithm>
#include <random>

#include "support/support.h"

namespace nvfp4_moe::internal::test::csf_test {
namespace {

constexpr CsfCodec kCodecs[] = {CsfCodec::kNvfp4, CsfCodec::kMxfp4};
int window_of(CsfCodec codec) { return codec == CsfCodec::kNvfp4 ? 16 : 2; }

Result<std::vector<uint8_t>> decode(CsfCodec codec, const CsfStreams& streams, int64_t rows,
                                    int64_t cols) {
  std::vector<uint8_t> out(static_cast<size_t>(rows * cols));
  NVFP4_MOE_TRY(
      decode_csf(codec, streams.fixed, streams.exceptions, rows, cols, 0, rows / 16, out.data()));
  return out;
}

// The definition, one scale at a time.
uint8_t scale_at(CsfCodec codec, const CsfStreams& streams, int64_t cols, int64_t r, int64_t c) {
  for (const uint32_t word : streams.exceptions)
    if ((word & 0xFFFFFF) == r * cols + c) return static_cast<uint8_t>(word >> 24);
  const bool nvfp4 = codec == CsfCodec::kNvfp4;
  const int64_t row_bytes = nvfp4 ? cols / 2 : (cols + 7) / 8;
  const uint8_t* const tile = streams.fixed.data() + r / 16 * 16 * (1 + row_bytes);
  const uint8_t* const codes = tile + 16 + r % 16 * row_bytes;
  const int code = nvfp4 ? codes[c / 2] >> (c % 2 * 4) & 15 : codes[c / 8] >> (c % 8) & 1;
  return static_cast<uint8_t>(tile[r % 16] + code);
}

// Scales of a row: any bytes; within a window; most of them; the ends of the range; one value.
uint8_t drawn(int kind, CsfCodec codec, int64_t row, std::mt19937& random) {
  const auto byte = static_cast<int>(random() % 256);
  const int window = window_of(codec);
  const auto first = static_cast<int>(row * 37 % (257 - window));
  switch (kind) {
    case 0: return static_cast<uint8_t>(byte);
    case 1: return static_cast<uint8_t>(first + byte % window);
    case 2: return static_cast<uint8_t>(byte < 8 ? random() : first + byte % window);
    case 3: return static_cast<uint8_t>(byte % 2 == 0 ? byte % 3 : 253 + byte % 3);
    default: return static_cast<uint8_t>(row % 2 == 0 ? 0x7E : 0xFF);
  }
}

TEST(Csf, AnyBytesComeBack) {
  std::mt19937 random(3);
  const std::pair<int64_t, int64_t> shapes[] = {{16, 2}, {32, 6}, {16, 40}, {160, 8}};
  for (const CsfCodec codec : kCodecs) {
    for (const auto& [rows, cols] : shapes) {
      for (int kind = 0; kind < 5; ++kind) {
        std::vector<uint8_t> scales;
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < cols; ++c) scales.push_back(drawn(kind, codec, r, random));
        ASSERT_OK(check_csf_shape(codec, rows, cols));
        const CsfStreams streams = encode_csf(codec, scales, rows, cols);
        EXPECT_EQ(static_cast<int64_t>(streams.fixed.size()), csf_fixed_bytes(codec, rows, cols));
        EXPECT_EQ(*must(decode(codec, streams, rows, cols)), scales) << kind;
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < cols; ++c)
            ASSERT_EQ(scale_at(codec, streams, cols, r, c),
                      scales[static_cast<size_t>(r * cols + c)]);
        if (kind == 1 || kind == 4) EXPECT_THAT(streams.exceptions, IsEmpty());
        // Streams of decoded scales are those they came from.
        const CsfStreams again =
            encode_csf(codec, *must(decode(codec, streams, rows, cols)), rows, cols);
        EXPECT_EQ(again.fixed, streams.fixed);
        EXPECT_EQ(again.exceptions, streams.exceptions);
      }
    }
  }
}

// The base covers the most scales; of several such bases, it is the lowest.
TEST(Csf, TheBaseIsTheLowestOfThoseThatCoverMost) {
  std::mt19937 random(5);
  for (const CsfCodec codec : kCodecs) {
    const int window = window_of(codec);
    for (int kind = 0; kind < 5; ++kind) {
      std::vector<uint8_t> scales;
      for (int64_t i = 0; i < 16 * 24; ++i) scales.push_back(drawn(kind, codec, i / 24, random));
      const CsfStreams streams = encode_csf(codec, scales, 16, 24);
      for (int64_t r = 0; r < 16; ++r) {
        const auto covered = [&](int base) {
          return std::count_if(
              scales.begin() + r * 24, scales.begin() + (r + 1) * 24,
              [&](uint8_t scale) { return scale >= base && scale < base + window; });
        };
        int best = 0;
        for (int base = 1; base <= 256 - window; ++base)
          if (covered(base) > covered(best)) best = base;
        EXPECT_EQ(streams.fixed[static_cast<size_t>(r)], best) << kind << " row " << r;
      }
    }
  }
}

TEST(Csf, ARangeOfTilesDecodesAsInTheWhole) {
  std::mt19937 random(9);
  for (const CsfCodec codec : kCodecs) {
    std::vector<uint8_t> scales;
    for (int64_t i = 0; i < 64 * 6; ++i) scales.push_back(drawn(2, codec, i / 6, random));
    const CsfStreams streams = encode_csf(codec, scales, 64, 6);
    const int64_t tile = csf_tile_bytes(codec, 6);
    for (int64_t first = 0; first < 4; ++first) {
      for (int64_t count = 1; first + count <= 4; ++count) {
        std::vector<uint8_t> out(static_cast<size_t>(count * 16 * 6));
        const std::span<const uint8_t> fixed(streams.fixed.data() + first * tile,
                                             static_cast<size_t>(count * tile));
        ASSERT_OK(decode_csf(codec, fixed, streams.exceptions, 64, 6, first, count, out.data()));
        EXPECT_TRUE(std::equal(out.begin(), out.end(), scales.begin() + first * 16 * 6));
      }
    }
  }
}

TEST(Csf, StreamsThatNoEncoderWritesAreRefused) {
  for (const CsfCodec codec : kCodecs) {
    const bool nvfp4 = codec == CsfCodec::kNvfp4;
    const int64_t cols = nvfp4 ? 4 : 11;
    const CsfStreams good =
        encode_csf(codec, std::vector<uint8_t>(static_cast<size_t>(32 * cols), 9), 32, cols);
    const auto last = static_cast<uint32_t>(32 * cols - 1);
    const auto refused = [&](CsfStreams streams, const std::string& words) {
      EXPECT_THAT(decode(codec, streams, 32, cols), Refused(Code::kBadInput, words));
    };
    CsfStreams bad = good;
    bad.exceptions = {last, last + 1};
    refused(bad, "exception 1: expected a position below " + std::to_string(last + 1));
    bad.exceptions = {0x00FFFFFF};
    refused(bad, "got 16777215");
    bad.exceptions = {3, 0x07000003};
    refused(bad, "exception 1: expected a position above 3, that of the one before it, got 3");
    bad.exceptions = {0x05000004, 2};
    refused(bad, "above 4");
    bad = good;
    bad.fixed[1] = nvfp4 ? 241 : 255;
    refused(bad, nvfp4 ? "row 1: expected a base of at most 240, got 241"
                       : "row 1: expected a base of at most 254, got 255");
    bad = good;
    bad.fixed.pop_back();
    refused(bad, "fixed: expected " + std::to_string(good.fixed.size()) + " bytes");
    if (nvfp4) continue;
    bad = good;
    bad.fixed[17] = 0x08;  // bit 11 of the first row
    refused(bad, "row 0: expected unused bits of 0");
  }
}

TEST(Csf, ShapesThatTheStreamsCannotHold) {
  const std::pair<int64_t, int64_t> bad[] = {
      {8, 4}, {0, 4}, {16, 0}, {4096, 4098}, {int64_t{1} << 40, int64_t{1} << 40}};
  for (const CsfCodec codec : kCodecs) {
    for (const auto& [rows, cols] : bad)
      EXPECT_THAT(check_csf_shape(codec, rows, cols), Refused(Code::kUnsupported, "16 rows"));
    EXPECT_OK(check_csf_shape(codec, 4096, 4096));
    EXPECT_EQ(check_csf_shape(codec, 16, 3).ok(), codec == CsfCodec::kMxfp4);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test::csf_test
