#include "backend/cpu/panel.h"

#include <algorithm>
#include <cstring>

#include "core/float_formats.h"

namespace nvfp4_moe::internal::cpu {
namespace {

// Offset of the byte of k (0..15 in its block) for row r, within the block's 128 bytes; bit 2 of k
// selects the nibble.
constexpr int64_t code_byte(int64_t r, int64_t k) { return (k >> 3) * 64 + r * 4 + (k & 3); }
constexpr bool in_high_nibble(int64_t k) { return (k & 4) != 0; }

}  // namespace

void pack_panel(const Nvfp4View& source, int64_t panel, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(panel_bytes(source.cols)));
  const int64_t first = panel * kPanelRows;
  const int64_t rows = std::min(kPanelRows, source.rows - first);
  const int64_t blocks = source.cols / kBlockElems;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* codes = source.row_codes(first + r);
    const uint8_t* scales = source.row_scales(first + r);
    for (int64_t b = 0; b < blocks; ++b) {
      uint8_t* chunk = out + b / kBlocksPerChunk * kChunkBytes;
      uint8_t* block = chunk + b % kBlocksPerChunk * kBlockCodesBytes;
      for (int64_t k = 0; k < kBlockElems; k += 2) {
        const uint8_t pair = codes[b * 8 + k / 2];
        const int shift = in_high_nibble(k) ? 4 : 0;
        block[code_byte(r, k)] =
            static_cast<uint8_t>(block[code_byte(r, k)] | low_code(pair) << shift);
        block[code_byte(r, k + 1)] =
            static_cast<uint8_t>(block[code_byte(r, k + 1)] | high_code(pair) << shift);
      }
      chunk[kChunkScalesOffset + b % kBlocksPerChunk * kPanelRows + r] = scales[b];
    }
  }
}

void unpack_panel(const uint8_t* packed, int64_t panel, int64_t rows, int64_t cols, uint8_t* codes,
                  uint8_t* block_scales) {
  const int64_t first = panel * kPanelRows;
  const int64_t blocks = cols / kBlockElems;
  for (int64_t r = 0; r < std::min(kPanelRows, rows - first); ++r) {
    uint8_t* row_codes = codes + (first + r) * cols / 2;
    uint8_t* row_scales = block_scales + (first + r) * blocks;
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* chunk = packed + b / kBlocksPerChunk * kChunkBytes;
      const uint8_t* block = chunk + b % kBlocksPerChunk * kBlockCodesBytes;
      for (int64_t k = 0; k < kBlockElems; k += 2) {
        const int shift = in_high_nibble(k) ? 4 : 0;
        row_codes[b * 8 + k / 2] =
            pack_codes(static_cast<uint8_t>(block[code_byte(r, k)] >> shift),
                       static_cast<uint8_t>(block[code_byte(r, k + 1)] >> shift));
      }
      row_scales[b] = chunk[kChunkScalesOffset + b % kBlocksPerChunk * kPanelRows + r];
    }
  }
}

}  // namespace nvfp4_moe::internal::cpu
