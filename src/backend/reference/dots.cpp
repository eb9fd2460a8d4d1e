#include "backend/reference/dots.h"

#include <algorithm>
#include <cstring>

#include "backend/reference/formats.h"
#include "backend/reference/fp8_weights.h"

namespace nvfp4_moe::internal::reference {
namespace {

// K elements decoded at a time: 16 KiB of int16, so that weights and accumulators stay in L1
constexpr int kKBlock = 256;
constexpr int kDoubleKBlock = 64;

// GCC and clang compile these to the target's vectors; only element-wise arithmetic is used.
using Int16Lanes = int16_t __attribute__((vector_size(kTileN * sizeof(int16_t)), may_alias));
constexpr int kDoubleLanes = 8;
using DoubleLanes = double __attribute__((vector_size(kDoubleLanes * sizeof(double)), may_alias));

// Weight rows [n0, n0 + n_count), elements [k0, k0 + k_count), each twice its code's value.
struct IntegerKBlock {
  Int16Lanes codes[kKBlock];                             // (k, n)
  alignas(64) int32_t scales[kKBlock / kBlock][kTileN];  // (block, n) in multiples of 2^-9

  void decode(const Nvfp4View& weight, int64_t n0, int n_count, int64_t k0, int k_count) {
    auto* out = reinterpret_cast<int16_t*>(codes);
    for (int n = 0; n < n_count; ++n) {
      const uint8_t* bytes = weight.row_codes(n0 + n) + k0 / 2;
      for (int i = 0; i < k_count / 2; ++i) {
        out[(2 * i) * kTileN + n] = kE2m1Doubled[bytes[i] & 15];
        out[(2 * i + 1) * kTileN + n] = kE2m1Doubled[bytes[i] >> 4];
      }
      const uint8_t* scale_bytes = weight.row_scales(n0 + n) + k0 / kBlock;
      for (int b = 0; b < k_count / kBlock; ++b) scales[b][n] = kE4m3Times512[scale_bytes[b] & 127];
    }
  }
};

// The same as doubles: the value e2m1 * e4m3, which a double holds exactly, or under fp8 the E4M3
// weight in multiples of 2^-9.
struct DoubleKBlock {
  alignas(64) double values[kDoubleKBlock][kTileN];  // (k, n)

  void decode_fp8(const Matrix& weight, int64_t n0, int n_count, int64_t k0, int k_count) {
    const Fp8WeightTable& table = fp8_weight_table(weight.fp8_shift);
    for (int n = 0; n < n_count; ++n) {
      const uint8_t* bytes = weight.row_codes(n0 + n) + k0 / 2;
      const uint8_t* scale_bytes = weight.row_scales(n0 + n) + k0 / kBlock;
      for (int i = 0; i < k_count / 2; ++i) {
        const std::array<double, 16>& by_code = table[scale_bytes[i / (kBlock / 2)]];
        values[2 * i][n] = by_code[bytes[i] & 15];
        values[2 * i + 1][n] = by_code[bytes[i] >> 4];
      }
    }
  }
  void decode(const Nvfp4View& weight, int64_t n0, int n_count, int64_t k0, int k_count) {
    for (int n = 0; n < n_count; ++n) {
      const uint8_t* bytes = weight.row_codes(n0 + n) + k0 / 2;
      const uint8_t* scale_bytes = weight.row_scales(n0 + n) + k0 / kBlock;
      for (int i = 0; i < k_count / 2; ++i) {
        const double half_scale = kE4m3Times512[scale_bytes[i / (kBlock / 2)] & 127] * 0x1p-10;
        values[2 * i][n] = kE2m1Doubled[bytes[i] & 15] * half_scale;
        values[2 * i + 1][n] = kE2m1Doubled[bytes[i] >> 4] * half_scale;
      }
    }
  }
};

// sum[j] += the values of outputs n + j times x(k), in increasing k. Passed by pointer: how such a
// vector is passed or returned by value depends on the instruction set.
template <class Element>
void add_products(const DoubleKBlock& k_block, int n, int k_count, const Element& x,
                  DoubleLanes* sum) {
  DoubleLanes lanes = *sum;
  for (int k = 0; k < k_count; ++k)
    lanes += *reinterpret_cast<const DoubleLanes*>(&k_block.values[k][n]) * x(k);
  *sum = lanes;
}

}  // namespace

void dots(const ActivationBuffers& activations, const int64_t* rows, int row_count,
          const Nvfp4View& weight, int64_t n0, Tile<int64_t>& tile) {
  const int n_count = static_cast<int>(std::min<int64_t>(kTileN, weight.rows - n0));
  std::memset(&tile, 0, sizeof(tile));
  IntegerKBlock k_block;
  if (n_count < kTileN)
    std::memset(&k_block, 0, sizeof(k_block));  // clears the lanes beyond the last weight row
  for (int64_t k0 = 0; k0 < weight.cols; k0 += kKBlock) {
    const int k_count = static_cast<int>(std::min<int64_t>(kKBlock, weight.cols - k0));
    k_block.decode(weight, n0, n_count, k0, k_count);
    for (int m = 0; m < row_count; ++m) {
      const uint8_t* bytes = activations.codes + (rows[m] * weight.cols + k0) / 2;
      const uint8_t* scale_bytes = activations.block_scales + (rows[m] * weight.cols + k0) / kBlock;
      for (int b = 0; b < k_count / kBlock; ++b) {
        Int16Lanes block{};
        for (int i = 0; i < kBlock / 2; ++i) {
          const uint8_t byte = bytes[b * (kBlock / 2) + i];
          block += k_block.codes[b * kBlock + 2 * i] * kE2m1Doubled[byte & 15];
          block += k_block.codes[b * kBlock + 2 * i + 1] * kE2m1Doubled[byte >> 4];
        }
        const int64_t scale = kE4m3Times512[scale_bytes[b] & 127];
        for (int n = 0; n < kTileN; ++n)
          tile.sum[m][n] += scale * (block[n] * k_block.scales[b][n]);
      }
    }
  }
}

void dots(const ActivationBuffers& activations, const int64_t* rows, int row_count,
          const Nvfp4View& weight, int64_t n0, Tile<WideSum>& tile) {
  const int n_count = static_cast<int>(std::min<int64_t>(kTileN, weight.rows - n0));
  std::memset(&tile, 0, sizeof(tile));
  IntegerKBlock k_block;
  if (n_count < kTileN) std::memset(&k_block, 0, sizeof(k_block));
  for (int64_t k0 = 0; k0 < weight.cols; k0 += kKBlock) {
    const int k_count = static_cast<int>(std::min<int64_t>(kKBlock, weight.cols - k0));
    k_block.decode(weight, n0, n_count, k0, k_count);
    for (int m = 0; m < row_count; ++m) {
      const int8_t* codes = activations.int8_codes + rows[m] * weight.cols + k0;
      const float* scales = activations.int8_scales + (rows[m] * weight.cols + k0) / kBlock;
      for (int b = 0; b < k_count / kBlock; ++b) {
        Int16Lanes block{};
        for (int i = 0; i < kBlock; ++i)
          block += k_block.codes[b * kBlock + i] * static_cast<int16_t>(codes[b * kBlock + i]);
        const BlockFactor scale(scales[b]);
        for (int n = 0; n < kTileN; ++n)
          tile.sum[m][n].bucket[scale.bucket] +=
              Int128{int64_t{block[n]} * k_block.scales[b][n]} * scale.factor;
      }
    }
  }
}

void dots(const ActivationBuffers& activations, const int64_t* rows, int row_count,
          const Nvfp4View& weight, int64_t n0, Tile<double>& tile) {
  const int n_count = static_cast<int>(std::min<int64_t>(kTileN, weight.rows - n0));
  std::memset(&tile, 0, sizeof(tile));
  DoubleKBlock k_block;
  if (n_count < kTileN) std::memset(&k_block, 0, sizeof(k_block));
  for (int64_t k0 = 0; k0 < weight.cols; k0 += kDoubleKBlock) {
    const int k_count = static_cast<int>(std::min<int64_t>(kDoubleKBlock, weight.cols - k0));
    k_block.decode(weight, n0, n_count, k0, k_count);
    for (int m = 0; m < row_count; ++m) {
      const uint16_t* x = activations.bf16 + rows[m] * weight.cols + k0;
      for (int n = 0; n < kTileN; n += kDoubleLanes)
        add_products(
            k_block, n, k_count, [x](int k) { return double{bf16_value(x[k])}; },
            reinterpret_cast<DoubleLanes*>(&tile.sum[m][n]));
    }
  }
}

void dots(const ActivationBuffers& activations, const int64_t* rows, int row_count,
          const Matrix& weight, int64_t n0, Tile<Fp8Sum>& tile) {
  const int n_count = static_cast<int>(std::min<int64_t>(kTileN, weight.rows - n0));
  std::memset(&tile, 0, sizeof(tile));
  DoubleKBlock k_block;
  if (n_count < kTileN) std::memset(&k_block, 0, sizeof(k_block));
  for (int64_t k0 = 0; k0 < weight.cols; k0 += kDoubleKBlock) {
    const int k_count = static_cast<int>(std::min<int64_t>(kDoubleKBlock, weight.cols - k0));
    k_block.decode_fp8(weight, n0, n_count, k0, k_count);
    for (int m = 0; m < row_count; ++m) {
      const uint8_t* codes = activations.fp8 + rows[m] * weight.cols + k0;
      double x[kDoubleKBlock];  // in multiples of 2^-9
      for (int k = 0; k < k_count; ++k)
        x[k] = (codes[k] < 128 ? 1 : -1) * kE4m3Times512[codes[k] & 127];
      for (int n = 0; n < kTileN; n += kDoubleLanes) {
        DoubleLanes lanes{};  // integers below 2^42: exact
        add_products(
            k_block, n, k_count, [&x](int k) { return x[k]; }, &lanes);
        for (int j = 0; j < kDoubleLanes; ++j)
          tile.sum[m][n + j].value += static_cast<int64_t>(lanes[j]);
      }
    }
  }
}

}  // namespace nvfp4_moe::internal::reference
