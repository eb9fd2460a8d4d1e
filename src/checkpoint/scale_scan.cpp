// Minimum and maximum are byte reductions, which compilers vectorize. Saturated scales are counted
// only in chunks whose maximum shows that there are some. Short rows of a larger matrix are first
// gathered into one chunk, since a loop per row would cost more than its bytes.
#include "checkpoint/scale_scan.h"

#include <algorithm>
#include <cstring>

namespace nvfp4_moe::internal {
namespace {

constexpr int64_t kChunk = 4096;  // fits the first level of cache

void scan_chunk(const uint8_t* bytes, int64_t size, ScaleScan& scan) {
  uint8_t low = 0xFF;
  uint8_t high = 0;
  for (int64_t i = 0; i < size; ++i) {
    low = bytes[i] < low ? bytes[i] : low;
    high = bytes[i] > high ? bytes[i] : high;
  }
  scan.min = std::min(scan.min, low);
  scan.max = std::max(scan.max, high);
  if (high < 0x7E) return;
  constexpr int64_t kStep = 240;  // a byte counts up to 255, so the count stays in byte lanes
  for (int64_t i = 0; i < size; i += kStep) {
    const uint8_t* step = bytes + i;
    const int64_t end = std::min(kStep, size - i);
    uint8_t found = 0;
    for (int64_t j = 0; j < end; ++j)
      found = static_cast<uint8_t>(found + (step[j] == 0x7E ? 1 : 0));
    scan.saturated += found;
  }
}

void scan_bytes(const uint8_t* bytes, int64_t size, ScaleScan& scan) {
  for (int64_t i = 0; i < size; i += kChunk)
    scan_chunk(bytes + i, std::min(kChunk, size - i), scan);
}

}  // namespace

void scan_scales(const uint8_t* scales, int64_t rows, int64_t cols, int64_t row_stride,
                 ScaleScan& scan) {
  scan.count += static_cast<uint64_t>(rows * cols);
  if (row_stride == cols) {
    scan_bytes(scales, rows * cols, scan);
    return;
  }
  if (cols == 0 || cols > kChunk / 4) {
    for (int64_t r = 0; r < rows; ++r) scan_bytes(scales + r * row_stride, cols, scan);
    return;
  }
  uint8_t gathered[kChunk];
  const int64_t rows_at_once = kChunk / cols;
  for (int64_t r0 = 0; r0 < rows; r0 += rows_at_once) {
    const int64_t count = std::min(rows_at_once, rows - r0);
    for (int64_t r = 0; r < count; ++r) {
      std::memcpy(gathered + r * cols, scales + (r0 + r) * row_stride, static_cast<size_t>(cols));
    }
    scan_chunk(gathered, count * cols, scan);
  }
}

InvalidScales find_invalid_scales(const uint8_t* scales, int64_t rows, int64_t cols,
                                  int64_t row_stride) {
  InvalidScales out;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const uint8_t byte = scales[r * row_stride + c];
      if (byte < 0x7F) continue;
      if (out.nan + out.negative == 0) {
        out.first_row = r;
        out.first_col = c;
        out.first_byte = byte;
      }
      if ((byte & 0x7F) == 0x7F) {
        ++out.nan;
      } else {
        ++out.negative;
      }
    }
  }
  return out;
}

bool all_powers_of_two(const uint8_t* scales, int64_t rows, int64_t cols, int64_t row_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const uint8_t byte = scales[r * row_stride + c];
      const bool power = byte < 8 ? (byte & (byte - 1)) == 0 : (byte & 7) == 0;
      if (!power) return false;
    }
  }
  return true;
}

}  // namespace nvfp4_moe::internal
