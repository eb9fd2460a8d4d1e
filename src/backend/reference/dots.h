// Dot products of activation rows with weight rows, one tile at a time. This takes nearly all of
// the reference's time, and is its only part written for speed.
//
// A k-block of weight rows is decoded once to small integers (or doubles), K-major so that lane n
// of a vector is output n, and used for up to kRows rows. A block's dot sum (2w)(2a) is at most
// 2304 and fits int16; scaled block terms are accumulated in int64. With int8 activations sum (2w)q
// is at most 24384, which fits int16 as well, and is accumulated in a WideSum. Every sum is exact,
// so tiling cannot change it. The bf16 dots accumulate in double in increasing k, one accumulator
// per output, so tiling cannot change them either. For fp8 rows both operands are multiples of 2^-9
// below 2^18 of them. A product is less than 2^36 multiples of 2^-18, and 2^20 products fit an
// int64, so they are added exactly as well.
#pragma once

#include <cstdint>

#include "backend/layer_steps.h"
#include "backend/reference/matrix.h"
#include "backend/reference/wide_sum.h"
#include "core/nvfp4_view.h"

namespace nvfp4_moe::internal::reference {

inline constexpr int kTileN = 32;  // outputs (weight rows)

// A sum of products of E4M3 values, in multiples of 2^-18.
struct Fp8Sum {
  int64_t value;
};

template <class Accumulator>
struct Tile {
  // Rows of activations: chosen to keep the accumulators within 32 KiB.
  static constexpr int kRows = sizeof(Accumulator) > sizeof(double) ? 8 : 32;
  alignas(64) Accumulator sum[kRows][kTileN];
};

// sum[m][n] = dot of activation row rows[m] with weight row n0 + n, in multiples of 2^-20, without
// tensor scales. m < row_count <= kRows; n < min(kTileN, rows - n0); other columns are unspecified.
void dots(const ActivationBuffers& activations, const int64_t* rows, int row_count,
          const Nvfp4View& weight, int64_t n0, Tile<int64_t>& tile);
// The same for bf16 rows.
void dots(const ActivationBuffers& activations, const int64_t* rows, int row_count,
          const Nvfp4View& weight, int64_t n0, Tile<double>& tile);
// The same for int8_block rows, exact.
void dots(const ActivationBuffers& activations, const int64_t* rows, int row_count,
          const Nvfp4View& weight, int64_t n0, Tile<WideSum>& tile);
// The same for fp8 rows, exact, with weights rounded according to the matrix's shift.
void dots(const ActivationBuffers& activations, const int64_t* rows, int row_count,
          const Matrix& weight, int64_t n0, Tile<Fp8Sum>& tile);

}  // namespace nvfp4_moe::internal::reference
