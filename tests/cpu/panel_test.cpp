// The CPU backend's packed layout: the byte offsets of the layout's picture.
// Unpack.GivesTheSourceBack of tests/steps has the way back.
#include "backend/cpu/panel.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "support/support.h"

namespace nvfp4_moe::internal::cpu {
namespace {

struct Matrix {
  std::vector<uint8_t> codes, scales;
  Nvfp4View view;
};

// Bytes that differ everywhere, with `pad` bytes between rows.
Matrix make_matrix(int64_t rows, int64_t cols, int64_t pad) {
  Matrix matrix;
  const int64_t codes_stride = cols / 2 + pad, scales_stride = cols / 16 + pad;
  matrix.codes.resize(static_cast<size_t>(rows * codes_stride));
  matrix.scales.resize(static_cast<size_t>(rows * scales_stride));
  uint32_t state = 12345;
  for (auto* bytes : {&matrix.codes, &matrix.scales})
    for (uint8_t& byte : *bytes)
      byte = static_cast<uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
  matrix.view = {matrix.codes.data(), matrix.scales.data(), 1.0f, rows, cols,
                 codes_stride,        scales_stride};
  return matrix;
}

// docs/explanation/layouts.md: chunk k/64, block k/16, vector (k/8) % 2, lane = row, byte k % 4,
// nibble (k/4) % 2.
TEST(Panel, EveryCodeLiesWhereTheLayoutSays) {
  const int64_t rows = 16, cols = 128;
  const Matrix matrix = make_matrix(rows, cols, 0);
  std::vector<uint8_t> packed(static_cast<size_t>(panel_bytes(cols)));
  pack_panel(matrix.view, 0, packed.data());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < cols; ++k) {
      const uint8_t source =
          static_cast<uint8_t>(matrix.view.row_codes(r)[k / 2] >> (k % 2 * 4) & 15);
      const int64_t byte = k / 64 * 576 + k % 64 / 16 * 128 + k / 8 % 2 * 64 + r * 4 + k % 4;
      EXPECT_EQ(packed[static_cast<size_t>(byte)] >> (k / 4 % 2 * 4) & 15, source)
          << r << ", " << k;
    }
    for (int64_t b = 0; b < cols / 16; ++b)
      EXPECT_EQ(packed[static_cast<size_t>(b / 4 * 576 + 512 + b % 4 * 16 + r)],
                matrix.view.row_scales(r)[b]);
  }
}

TEST(Panel, RowsAndColumnsBeyondTheMatrixAreZero) {
  const Matrix matrix = make_matrix(5, 16, 0);
  std::vector<uint8_t> packed(static_cast<size_t>(panel_bytes(16)), 0xFF);
  pack_panel(matrix.view, 0, packed.data());
  for (int64_t k_block = 0; k_block < 4; ++k_block)
    for (int64_t r = 0; r < 16; ++r)
      if (k_block > 0 || r >= 5) {
        EXPECT_EQ(packed[static_cast<size_t>(512 + k_block * 16 + r)], 0);
        for (int64_t byte = 0; byte < 4; ++byte)
          EXPECT_EQ(packed[static_cast<size_t>(k_block * 128 + r * 4 + byte)], 0);
      }
}

}  // namespace
}  // namespace nvfp4_moe::internal::cpu
