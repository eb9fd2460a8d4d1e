// A chunk's count of 0x7E fits a byte because the chunk has at most 255 of each lane's visits: counting in bytes keeps
// the whole reduction in byte lanes.
#include "checkpoint/scale_scan.h"

#include <algorithm>

namespace nvfp4_moe {
namespace {

constexpr int64_t kLanes = 64;
constexpr int64_t kChunk = kLanes * 255;

void scan_row(const uint8_t* bytes, int64_t size, ScaleScan& scan) {
  int64_t i = 0;
  while (size - i >= kLanes) {
    uint8_t low[kLanes];
    uint8_t high[kLanes];
    uint8_t full[kLanes];
    std::fill_n(low, kLanes, uint8_t{0xFF});
    std::fill_n(high, kLanes, uint8_t{0});
    std::fill_n(full, kLanes, uint8_t{0});
    const int64_t end = i + std::min((size - i) / kLanes * kLanes, kChunk);
    for (; i < end; i += kLanes) {
      const uint8_t* line = bytes + i;
      for (int64_t j = 0; j < kLanes; ++j) {
        low[j] = std::min(low[j], line[j]);
        high[j] = std::max(high[j], line[j]);
        full[j] = static_cast<uint8_t>(full[j] + (line[j] == 0x7E ? 1 : 0));
      }
    }
    for (int64_t j = 0; j < kLanes; ++j) {
      scan.min = std::min(scan.min, low[j]);
      scan.max = std::max(scan.max, high[j]);
      scan.saturated += full[j];
    }
  }
  for (; i < size; ++i) {
    scan.min = std::min(scan.min, bytes[i]);
    scan.max = std::max(scan.max, bytes[i]);
    scan.saturated += bytes[i] == 0x7E ? 1 : 0;
  }
}

}  // namespace

void scan_scales(const uint8_t* scales, int64_t rows, int64_t cols, int64_t row_stride, ScaleScan& scan) {
  scan.count += static_cast<uint64_t>(rows * cols);
  if (row_stride == cols) {
    scan_row(scales, rows * cols, scan);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) scan_row(scales + r * row_stride, cols, scan);
}

InvalidScales find_invalid_scales(const uint8_t* scales, int64_t rows, int64_t cols, int64_t row_stride) {
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

}  // namespace nvfp4_moe
