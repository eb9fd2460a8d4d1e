#include "core/csf.h"

#include <algorithm>
#include <array>
#include <string>

namespace nvfp4_moe::internal {
namespace {

constexpr int64_t kTileRows = 16;
constexpr uint32_t kPositionBits = 24;
constexpr uint32_t kPositionMask = (uint32_t{1} << kPositionBits) - 1;

// Distinct codes: the window of values that a row's codes reach.
constexpr int window(CsfCodec codec) { return codec == CsfCodec::kNvfp4 ? 16 : 2; }

int64_t row_bytes(CsfCodec codec, int64_t cols) {
  return codec == CsfCodec::kNvfp4 ? cols / 2 : (cols + 7) / 8;
}

void decode_row(CsfCodec codec, uint8_t base, const uint8_t* codes, int64_t cols, uint8_t* out) {
  if (codec == CsfCodec::kNvfp4) {
    for (int64_t i = 0; i < cols / 2; ++i) {
      out[2 * i] = static_cast<uint8_t>(base + (codes[i] & 15));
      out[2 * i + 1] = static_cast<uint8_t>(base + (codes[i] >> 4));
    }
    return;
  }
  for (int64_t c = 0; c < cols; ++c)
    out[c] = static_cast<uint8_t>(base + (codes[c / 8] >> (c % 8) & 1));
}

// The lowest base that covers the most of the row's scales.
int base_of(CsfCodec codec, const uint8_t* scales, int64_t cols) {
  std::array<int64_t, 256> count{};
  for (int64_t c = 0; c < cols; ++c) ++count[scales[c]];
  const int width = window(codec);
  int64_t covered = 0;
  for (int value = 0; value < width; ++value) covered += count[static_cast<size_t>(value)];
  int64_t most = covered;
  int base = 0;
  for (int next = 1; next <= 256 - width; ++next) {
    covered += count[static_cast<size_t>(next + width - 1)] - count[static_cast<size_t>(next - 1)];
    if (covered <= most) continue;
    most = covered;
    base = next;
  }
  return base;
}

std::string number(int64_t value) { return std::to_string(value); }

Status check_exceptions(std::span<const uint32_t> exceptions, int64_t elems) {
  int64_t last = -1;
  for (size_t i = 0; i < exceptions.size(); ++i) {
    const int64_t position = exceptions[i] & kPositionMask;
    if (position < elems && position > last) {
      last = position;
      continue;
    }
    const std::string wanted = position >= elems
                                   ? "below " + number(elems)
                                   : "above " + number(last) + ", that of the one before it";
    return bad_input("exception " + std::to_string(i) + ": expected a position " + wanted +
                     ", got " + number(position));
  }
  return {};
}

}  // namespace

std::string_view csf_codec_name(CsfCodec codec) {
  return codec == CsfCodec::kNvfp4 ? "byte-window4-fixed-stream-u24-exceptions/1"
                                   : "row-base-offset1-u24-exceptions/1";
}
std::string_view csf_fixed_suffix(CsfCodec codec) {
  return codec == CsfCodec::kNvfp4 ? ".nvfp4_csf_fixed" : ".mxfp4_csf_fixed";
}
std::string_view csf_exceptions_suffix(CsfCodec codec) {
  return codec == CsfCodec::kNvfp4 ? ".nvfp4_csf_exceptions" : ".mxfp4_csf_exceptions";
}

int64_t csf_tile_bytes(CsfCodec codec, int64_t cols) {
  return kTileRows * (1 + row_bytes(codec, cols));
}

Status check_csf_shape(CsfCodec codec, int64_t rows, int64_t cols) {
  const bool even = codec != CsfCodec::kNvfp4 || cols % 2 == 0;
  constexpr int64_t kMost = int64_t{1} << kPositionBits;
  if (rows > 0 && cols > 0 && rows % kTileRows == 0 && even && rows <= kMost / cols) return {};
  const std::string columns = codec == CsfCodec::kNvfp4 ? "an even number of columns and " : "";
  return unsupported("CSF: expected scales with a multiple of 16 rows, " + columns +
                     "at most 2^24 in all, got (" + number(rows) + ", " + number(cols) + ")");
}

Status decode_csf(CsfCodec codec, std::span<const uint8_t> fixed,
                  std::span<const uint32_t> exceptions, int64_t rows, int64_t cols, int64_t first,
                  int64_t count, uint8_t* out) {
  const int64_t tile_bytes = csf_tile_bytes(codec, cols);
  if (static_cast<int64_t>(fixed.size()) != count * tile_bytes)
    return bad_input("fixed: expected " + number(count * tile_bytes) + " bytes, got " +
                     std::to_string(fixed.size()));
  NVFP4_MOE_TRY(check_exceptions(exceptions, rows * cols));
  const int64_t codes_bytes = row_bytes(codec, cols);
  const int most = 256 - window(codec);
  const int unused = codec == CsfCodec::kMxfp4 ? static_cast<int>(codes_bytes * 8 - cols) : 0;
  for (int64_t r = 0; r < kTileRows * count; ++r) {
    const uint8_t* const tile = fixed.data() + r / kTileRows * tile_bytes;
    const uint8_t base = tile[r % kTileRows];
    const uint8_t* const codes = tile + kTileRows + r % kTileRows * codes_bytes;
    if (base > most)
      return bad_input("fixed: row " + number(first * kTileRows + r) +
                       ": expected a base of at most " + number(most) + ", got " + number(base));
    if (unused > 0 && codes[codes_bytes - 1] >> (8 - unused) != 0)
      return bad_input("fixed: row " + number(first * kTileRows + r) +
                       ": expected unused bits of 0, got others");
    decode_row(codec, base, codes, cols, out + r * cols);
  }
  const int64_t begin = first * kTileRows * cols;
  const auto position = [](uint32_t word) { return int64_t{word & kPositionMask}; };
  auto next = std::partition_point(exceptions.begin(), exceptions.end(),
                                   [&](uint32_t word) { return position(word) < begin; });
  for (; next != exceptions.end() && position(*next) < begin + kTileRows * count * cols; ++next)
    out[position(*next) - begin] = static_cast<uint8_t>(*next >> kPositionBits);
  return {};
}

CsfStreams encode_csf(CsfCodec codec, std::span<const uint8_t> scales, int64_t rows, int64_t cols) {
  CsfStreams out;
  out.fixed.assign(static_cast<size_t>(csf_fixed_bytes(codec, rows, cols)), 0);
  const int64_t tile_bytes = csf_tile_bytes(codec, cols);
  const int64_t codes_bytes = row_bytes(codec, cols);
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* const row = scales.data() + r * cols;
    const int base = base_of(codec, row, cols);
    uint8_t* const tile = out.fixed.data() + r / kTileRows * tile_bytes;
    tile[r % kTileRows] = static_cast<uint8_t>(base);
    uint8_t* const codes = tile + kTileRows + r % kTileRows * codes_bytes;
    for (int64_t c = 0; c < cols; ++c) {
      const int code = row[c] - base;
      if (code < 0 || code >= window(codec)) {
        out.exceptions.push_back(static_cast<uint32_t>(row[c]) << kPositionBits |
                                 static_cast<uint32_t>(r * cols + c));
        continue;
      }
      const int64_t at = codec == CsfCodec::kNvfp4 ? c / 2 : c / 8;
      const int64_t shift = codec == CsfCodec::kNvfp4 ? c % 2 * 4 : c % 8;
      codes[at] = static_cast<uint8_t>(codes[at] | code << shift);
    }
  }
  return out;
}

}  // namespace nvfp4_moe::internal
