// Reads every block scale of a checkpoint once, at memory speed. Private to src/checkpoint.
//
// Scale matrices are (rows, cols) bytes with a row stride. Valid E4M3 block scales are 0x00..0x7E,
// and their order as bytes is their order as numbers. The loops are plain min / max / count
// reductions over bytes, which compilers vectorize.
#pragma once

#include <cstdint>

namespace nvfp4_moe::internal {

struct ScaleScan {
  uint8_t min = 0xFF;
  uint8_t max = 0;
  uint64_t count = 0;
  uint64_t saturated = 0;  // bytes 0x7E

  bool valid() const { return max < 0x7F; }
  bool has_zero() const { return min == 0; }
};
// Adds rows x cols bytes, row r at scales + r * row_stride, to the scan.
void scan_scales(const uint8_t* scales, int64_t rows, int64_t cols, int64_t row_stride,
                 ScaleScan& scan);

struct InvalidScales {
  uint64_t nan = 0;       // 0x7F, 0xFF
  uint64_t negative = 0;  // sign bit set, not NaN
  int64_t first_row = -1, first_col = -1;
  uint8_t first_byte = 0;
};
// The slow pass that counts the invalid bytes after scan_scales has seen one.
InvalidScales find_invalid_scales(const uint8_t* scales, int64_t rows, int64_t cols,
                                  int64_t row_stride);

// Whether every byte is zero or a power of two (0x01, 0x02, 0x04, and a zero mantissa above). Stops
// at the first other byte.
bool all_powers_of_two(const uint8_t* scales, int64_t rows, int64_t cols, int64_t row_stride);

}  // namespace nvfp4_moe::internal
