// The layouts of tcgen05's operands on a host, against a model of how the tensor cores read them.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <set>
#include <vector>

#include "backend/sm100/config.h"
#include "backend/sm100/row_tile.h"
#include "backend/sm100/weight_tile.h"
#include "core/float_formats.h"
#include "core/random.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(Tcgen05Tile, OffsetsCoverTheTile) {
  std::set<int> words;
  for (int row = 0; row < cuda::kTileRows; ++row) {
    for (int c = 0; c < sm100::kWeightRowBytes / 16; ++c)
      for (int word = 0; word < 4; ++word)
        EXPECT_TRUE(words.insert(sm100::weight_codes_offset(row, c) + word * 4).second);
    for (int step = 0; step < sm100::kTileSteps; ++step)
      EXPECT_TRUE(words.insert(sm100::weight_scales_offset(row, step)).second);
  }
  EXPECT_EQ(static_cast<int64_t>(words.size()), cuda::kTileBytes / 4);
  EXPECT_EQ(*words.rbegin() + 4, cuda::kTileBytes);
}

TEST(Tcgen05Rows, OffsetsCoverTheStage) {
  for (const sm100::GemmConfig& gemm : sm100::kGemmConfigs) {
    std::set<int> codes, scales;
    const int atoms = sm100::atoms_of(gemm.tile_n);
    for (int row = 0; row < gemm.tile_n; ++row) {
      for (int c = 0; c < sm100::kRowVecs; ++c)
        EXPECT_TRUE(codes.insert(sm100::row_codes_offset(row, c)).second);
      for (int step = 0; step < sm100::kBlockSteps; ++step)
        EXPECT_TRUE(scales.insert(sm100::row_scales_offset(row, step, atoms)).second);
    }
    EXPECT_EQ(*codes.rbegin() + 16, gemm.tile_n * sm100::kRowBytes);
    EXPECT_LE(*scales.rbegin() + 4, sm100::kBlockSteps * atoms * sm100::kAtomBytes);
  }
}

// Eight rows of 16 bytes at the same k, which the tensor cores read together, are in 128 bytes of
// different banks.
TEST(Tcgen05Tile, EightRowsHaveNoBankConflict) {
  for (int row = 0; row < cuda::kTileRows; row += 8)
    for (int c = 0; c < sm100::kRowVecs; ++c) {
      std::set<int> weights, rows;
      for (int r = row; r < row + 8; ++r) {
        weights.insert(sm100::weight_codes_offset(r, c % 4) % 128);
        rows.insert(sm100::row_codes_offset(r, c) % 128);
      }
      EXPECT_EQ(weights.size(), 8u);
      EXPECT_EQ(rows.size(), 8u);
    }
}

// ---- a model of the tensor cores, after the tables of the PTX manual

// A byte of a row of a K-major operand. The operand's first row begins at `start` of the bytes: a
// multiple of the swizzle's period, or 32 k further. Rows have 64 or 128 bytes; in their addresses
// bits 4.. are XORed with those from 7 on.
uint8_t operand_byte(const std::vector<uint8_t>& bytes, int start, int row_bytes, int row,
                     int byte) {
  const int address = start + row * row_bytes + byte;
  return bytes[static_cast<size_t>(address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4)];
}
// 32 lanes of four columns after tcgen05.cp.32x128b: the scales of row r are in lane r % 32 of
// column r / 32.
std::array<uint8_t, 4> scales_of_row(const std::vector<uint8_t>& bytes, int atoms, int row) {
  std::array<uint8_t, 4> scales;
  const int column = row / 32, lane = row % 32;
  std::memcpy(scales.data(),
              bytes.data() + atoms + column / 4 * sm100::kAtomBytes + lane * 16 + column % 4 * 4,
              4);
  return scales;
}

TEST(Tcgen05Tile, TheTensorCoresMultiplyWhatWasPacked) {
  constexpr int kRows = 128, kTokens = 136, kK = 256, kBlocks = kK / 16;
  constexpr int kTileBytes = static_cast<int>(cuda::kTileBytes);
  Random random(7);
  const auto fill = [&](int count, uint64_t below) {
    std::vector<uint8_t> values(static_cast<size_t>(count));
    for (uint8_t& value : values) value = static_cast<uint8_t>(random.below(below));
    return values;
  };
  const auto weights = fill(kRows * kK, 16), x = fill(kTokens * kK, 16);
  const auto weight_scales = fill(kRows * kBlocks, 0x7F), x_scales = fill(kTokens * kBlocks, 0x7F);
  const int atoms = sm100::atoms_of(kTokens);
  std::vector<uint8_t> tiles(2 * kTileBytes), codes(kTokens * sm100::kRowBytes),
      scales(static_cast<size_t>(sm100::kBlockSteps * atoms * sm100::kAtomBytes));
  const auto put_code = [](std::vector<uint8_t>& to, int at, int k, uint8_t code) {
    to[static_cast<size_t>(at + k % 32 / 2)] |= static_cast<uint8_t>(code << k % 2 * 4);
  };
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < kK; ++k) {
      const int tile = k / 128 * kTileBytes, within = k % 128;
      put_code(tiles, tile + sm100::weight_codes_offset(row, within / 32), k,
               weights[static_cast<size_t>(row * kK + k)]);
      tiles[static_cast<size_t>(tile + sm100::weight_scales_offset(row, within / 64) +
                                within % 64 / 16)] =
          weight_scales[static_cast<size_t>(row * kBlocks + k / 16)];
    }
  for (int token = 0; token < kTokens; ++token)
    for (int k = 0; k < kK; ++k) {
      put_code(codes, sm100::row_codes_offset(token, k / 32), k,
               x[static_cast<size_t>(token * kK + k)]);
      scales[static_cast<size_t>(sm100::row_scales_offset(token, k / 64, atoms) + k % 64 / 16)] =
          x_scales[static_cast<size_t>(token * kBlocks + k / 16)];
    }
  const auto nibble = [](uint8_t byte, int k) {
    return double{e2m1_to_float(byte >> k % 2 * 4 & 15)};
  };
  for (int row = 0; row < kRows; row += 3)
    for (int token = 0; token < kTokens; token += 5) {
      double sum = 0, expected = 0;  // multiples of 2^-20 below 2^34: exact
      for (int step = 0; step < sm100::kBlockSteps; ++step) {
        const int tile = step / 2 * kTileBytes;
        const auto a = scales_of_row(tiles, tile + sm100::weight_scales_offset(0, step % 2), row),
                   b = scales_of_row(scales, sm100::row_scales_offset(0, step, atoms), token);
        for (int k = 0; k < 64; ++k)
          sum +=
              nibble(operand_byte(tiles, tile + step % 2 * sm100::kStepBytes,
                                  sm100::kWeightRowBytes, row, k / 2),
                     k) *
              nibble(operand_byte(codes, step * sm100::kStepBytes, sm100::kRowBytes, token, k / 2),
                     k) *
              e4m3_to_float(a[static_cast<size_t>(k / 16)]) *
              e4m3_to_float(b[static_cast<size_t>(k / 16)]);
      }
      for (int k = 0; k < kK; ++k) {
        const auto w = static_cast<size_t>(row * kK + k), t = static_cast<size_t>(token * kK + k);
        expected += double{e2m1_to_float(weights[w])} * e2m1_to_float(x[t]) *
                    e4m3_to_float(weight_scales[w / 16]) * e4m3_to_float(x_scales[t / 16]);
      }
      ASSERT_EQ(sum, expected) << row << " " << token;
    }
}

// A k-block is one of a row and whole tiles of weights, and the configurations grow.
TEST(Sm100Config, BlocksAreWhole) {
  EXPECT_EQ(sm100::kBlockK % cuda::kTileK, 0);
  for (size_t i = 0; i < sm100::kGemmConfigs.size(); ++i) {
    const sm100::GemmConfig& gemm = sm100::kGemmConfigs[i];
    EXPECT_EQ(gemm.tile_n % 8, 0) << gemm.name;
    if (i > 0) {
      EXPECT_GT(gemm.tile_n, sm100::kGemmConfigs[i - 1].tile_n);
      EXPECT_GT(gemm.max_rows_per_expert, sm100::kGemmConfigs[i - 1].max_rows_per_expert);
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
