// The layouts of FP4 products on a host, against a model of the instruction that reads them.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <set>
#include <vector>

#include "backend/cuda/fp4_operand.h"
#include "backend/sm120/config.h"
#include "backend/sm120/weight_tile.h"
#include "core/float_formats.h"
#include "core/random.h"

namespace nvfp4_moe::internal::test {
namespace {

// Every code of a group of 16 rows x 64 k has exactly one place, and so has every scale.
TEST(Fp4Tile, ALaneHasEachCodeOnce) {
  std::set<std::pair<int, int>> seen;
  for (int lane = 0; lane < 32; ++lane)
    for (int word = 0; word < sm120::kWordsPerLane; ++word) {
      const sm120::CodeWord at = sm120::code_word(lane, word);
      EXPECT_EQ(at.k % 8, 0);
      EXPECT_TRUE(at.row >= 0 && at.row < 16 && at.k >= 0 && at.k < 64);
      EXPECT_TRUE(seen.insert({at.row, at.k}).second) << lane << " " << word;
    }
  EXPECT_EQ(seen.size(), 16u * 8u);
}

TEST(Fp4Tile, OffsetsCoverTheTile) {
  std::set<int> words;
  for (int group = 0; group < cuda::kGroups; ++group)
    for (int half = 0; half < cuda::kHalves; ++half) {
      for (int lane = 0; lane < 32; ++lane)
        for (int word = 0; word < 4; ++word)
          EXPECT_TRUE(words.insert(cuda::lane_offset(group, half, lane) + word * 4).second);
      for (int row = 0; row < 16; ++row)
        EXPECT_TRUE(words.insert(sm120::scale_word_offset(group, half, row)).second);
    }
  EXPECT_EQ(static_cast<int64_t>(words.size()), cuda::kTileBytes / 4);
  EXPECT_EQ(*words.rbegin() + 4, cuda::kTileBytes);
}

// Selectors 0 read lanes 4r and 4r + 1.
TEST(Fp4Tile, TheFirstTwoLanesOfEachFourGiveTheScales) {
  for (int r = 0; r < 8; ++r) {
    EXPECT_EQ(sm120::scale_row(4 * r), r);
    EXPECT_EQ(sm120::scale_row(4 * r + 1), r + 8);
  }
}

TEST(Fp4Operand, OffsetsCoverTheRow) {
  for (int64_t k : {16, 48, 64, 144, 256, 272, 720, 1040, 7168}) {
    SCOPED_TRACE(k);
    const int64_t row_bytes = cuda::fp4_row_bytes(k), vec8s = cuda::fp4_row_vec8s(k);
    EXPECT_EQ(row_bytes % 16, 0);
    EXPECT_GE(vec8s * 8, k);
    EXPECT_LT(vec8s * 8, k + cuda::kFp4KBlock);
    std::vector<int> written(static_cast<size_t>(row_bytes));
    for (int64_t i = 0; i < vec8s; ++i) {
      EXPECT_EQ(cuda::fp4_codes_offset(i) % 4, 0);
      for (int64_t byte = 0; byte < 4; ++byte)
        ++written.at(static_cast<size_t>(cuda::fp4_codes_offset(i) + byte));
      EXPECT_EQ(cuda::fp4_scale_offset(i), cuda::fp4_scale_offset(i / 2 * 2));
      if (i % 2 == 0) ++written.at(static_cast<size_t>(cuda::fp4_scale_offset(i)));
    }
    for (int times : written) ASSERT_EQ(times, 1);
  }
}

// ---- a model of mma.m16n8k64 with block scales, after the tables of the PTX manual

struct Lane {
  std::array<uint32_t, 4> a;
  std::array<uint32_t, 2> b;
  uint32_t scales_a, scales_b;
};
double nibble(uint32_t word, int i) {
  return e2m1_to_float(static_cast<uint8_t>(word >> 4 * i & 15));
}
double scale(uint32_t word, int i) {
  return e4m3_to_float(static_cast<uint8_t>(word >> 8 * i & 0x7F));
}

// d (16, 8), exactly.
std::array<std::array<double, 8>, 16> model_mma(const std::array<Lane, 32>& lanes) {
  std::array<std::array<double, 8>, 16> d{};
  for (int row = 0; row < 16; ++row)
    for (int n = 0; n < 8; ++n)
      for (int k = 0; k < 64; ++k) {
        const size_t quad = static_cast<size_t>(k % 32 / 8), high = static_cast<size_t>(k / 32);
        const Lane& of_a = lanes[static_cast<size_t>(row % 8 * 4) + quad];
        const Lane& of_b = lanes[static_cast<size_t>(n * 4) + quad];
        const double w = nibble(of_a.a[static_cast<size_t>(row / 8) + 2 * high], k % 8),
                     x = nibble(of_b.b[high], k % 8);
        d[static_cast<size_t>(row)][static_cast<size_t>(n)] +=
            w * x * scale(lanes[static_cast<size_t>(row % 8 * 4 + row / 8)].scales_a, k / 16) *
            scale(lanes[static_cast<size_t>(n * 4)].scales_b, k / 16);
      }
  return d;
}

// Weights are packed at the tile's offsets, activations at the operand's, and fed to the
// instruction as the mainloop does. The results are the products of the two matrices.
TEST(Fp4Tile, TheInstructionMultipliesWhatWasPacked) {
  constexpr int kRows = 128, kTokens = 8, kK = 128;
  Random random(7);
  std::vector<uint8_t> weights(kRows * kK), weight_scales(kRows * kK / 16), x(kTokens * kK),
      x_scales(kTokens * kK / 16);
  for (uint8_t& code : weights) code = static_cast<uint8_t>(random.below(16));
  for (uint8_t& code : x) code = static_cast<uint8_t>(random.below(16));
  for (uint8_t& byte : weight_scales) byte = static_cast<uint8_t>(random.below(0x7F));
  for (uint8_t& byte : x_scales) byte = static_cast<uint8_t>(random.below(0x7F));

  std::vector<uint8_t> tile(cuda::kTileBytes), rows(kTokens * cuda::fp4_row_bytes(kK));
  for (int group = 0; group < cuda::kGroups; ++group)
    for (int half = 0; half < cuda::kHalves; ++half) {
      for (int lane = 0; lane < 32; ++lane)
        for (int word = 0; word < 4; ++word) {
          const sm120::CodeWord at = sm120::code_word(lane, word);
          for (int i = 0; i < 8; ++i)
            tile[static_cast<size_t>(cuda::lane_offset(group, half, lane) + word * 4 + i / 2)] |=
                static_cast<uint8_t>(
                    weights[static_cast<size_t>((group * 16 + at.row) * kK + half * 64 + at.k + i)]
                    << i % 2 * 4);
        }
      for (int row = 0; row < 16; ++row)
        for (int block = 0; block < 4; ++block)
          tile[static_cast<size_t>(sm120::scale_word_offset(group, half, row) + block)] =
              weight_scales[static_cast<size_t>((group * 16 + row) * kK / 16 + half * 4 + block)];
    }
  for (int token = 0; token < kTokens; ++token)
    for (int k = 0; k < kK; ++k) {
      uint8_t* const row = rows.data() + token * cuda::fp4_row_bytes(kK);
      row[cuda::fp4_codes_offset(k / 8) + k % 8 / 2] |=
          static_cast<uint8_t>(x[static_cast<size_t>(token * kK + k)] << k % 2 * 4);
      row[cuda::fp4_scale_offset(k / 8)] = x_scales[static_cast<size_t>((token * kK + k) / 16)];
    }

  const auto word = [](const uint8_t* from) {
    uint32_t value;
    std::memcpy(&value, from, 4);
    return value;
  };
  for (int group = 0; group < cuda::kGroups; ++group) {
    std::array<std::array<double, 8>, 16> sum{};
    for (int half = 0; half < cuda::kHalves; ++half) {
      std::array<Lane, 32> lanes;
      for (int l = 0; l < 32; ++l) {
        Lane& lane = lanes[static_cast<size_t>(l)];
        for (int i = 0; i < 4; ++i)
          lane.a[static_cast<size_t>(i)] =
              word(tile.data() + cuda::lane_offset(group, half, l) + i * 4);
        lane.scales_a =
            word(tile.data() + sm120::scale_word_offset(group, half, sm120::scale_row(l)));
        // The result of ldmatrix: 16 bytes of a row for four lanes.
        const uint8_t* const row = rows.data() + l / 4 * cuda::fp4_row_bytes(kK);
        for (int i = 0; i < 2; ++i)
          lane.b[static_cast<size_t>(i)] = word(row + half * 32 + i * 16 + l % 4 * 4);
        lane.scales_b = word(row + cuda::kFp4KBlockScales + half * 4);
      }
      const auto d = model_mma(lanes);
      for (size_t r = 0; r < 16; ++r)
        for (size_t n = 0; n < 8; ++n) sum[r][n] += d[r][n];
    }
    for (int r = 0; r < 16; ++r)
      for (int n = 0; n < kTokens; ++n) {
        double expected = 0;  // multiples of 2^-20 below 2^33: exact
        for (int k = 0; k < kK; ++k) {
          const auto w = static_cast<size_t>((group * 16 + r) * kK + k),
                     t = static_cast<size_t>(n * kK + k);
          expected += double{e2m1_to_float(weights[w])} * e2m1_to_float(x[t]) *
                      e4m3_to_float(weight_scales[w / 16]) * e4m3_to_float(x_scales[t / 16]);
        }
        ASSERT_EQ(sum[static_cast<size_t>(r)][static_cast<size_t>(n)], expected)
            << group << " " << r << " " << n;
      }
  }
}

// A k-block is one of a row and whole tiles of weights.
TEST(Sm120Config, BlocksAreWhole) {
  EXPECT_EQ(sm120::kBlockK % cuda::kTileK, 0);
  for (size_t i = 0; i < sm120::kGemmConfigs.size(); ++i) {
    const sm120::GemmConfig& gemm = sm120::kGemmConfigs[i];
    EXPECT_EQ(gemm.tile_n % (8 * gemm.warps_n), 0) << gemm.name;
    if (i > 0) {
      EXPECT_GT(gemm.tile_n, sm120::kGemmConfigs[i - 1].tile_n);
      EXPECT_GT(gemm.max_rows_per_expert, sm120::kGemmConfigs[i - 1].max_rows_per_expert);
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
