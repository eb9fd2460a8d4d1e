// How the warps of a cta divide its weights among them in the layer in one launch (decode.cuh).
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/scheduler.h"
#include "backend/sm90/decode.h"

namespace nvfp4_moe::internal::sm90 {

// The length of a row of subtiles along K.
struct DecodeLength {
  int32_t k_tiles;
  cuda::Divider by_k_tiles;

  DecodeLength() = default;
  explicit DecodeLength(int32_t k_tiles_) : k_tiles(k_tiles_), by_k_tiles(k_tiles_) {}
};

// A warp's share of a phase. A row of subtiles has the same 16 weight rows and follows its matrix
// along K. All rows of the phase, one after the other, are divided into a run for each warp, equal
// to within one subtile. So a row may begin in one run and end in a later one.
struct DecodeRun {
  int32_t warp, all;                // all: the subtiles of all runs
  int32_t first, last;              // subtiles of this run: [first, last)
  int32_t first_row, first_k_tile;  // the place of the run's first subtile

  DecodeRun() = default;
  // `rows` of the one length, followed by `last_rows` of the other.
  NVFP4_MOE_HOST_DEVICE DecodeRun(int32_t warp_, int32_t rows, const DecodeLength& length,
                                  int32_t last_rows, const DecodeLength& last_length)
      : warp(warp_),
        all(rows * length.k_tiles + last_rows * last_length.k_tiles),
        first(begin(warp_)),
        last(begin(warp_ + 1)) {
    const int32_t after = first - rows * length.k_tiles;
    const int32_t row = after < 0 ? length.by_k_tiles(first) : last_length.by_k_tiles(after);
    first_row = after < 0 ? row : rows + row;
    first_k_tile = after < 0 ? first - row * length.k_tiles : after - row * last_length.k_tiles;
  }
  NVFP4_MOE_HOST_DEVICE int32_t begin(int32_t of_warp) const {
    return all * of_warp >> kDecodeWarpsShift;
  }
};

// Goes through the rows of a run.
struct DecodeRows {
  int32_t row, k_tile;  // the row, and the first of its subtiles in the run
  int32_t left;         // subtiles of the run, from this one on

  NVFP4_MOE_HOST_DEVICE explicit DecodeRows(const DecodeRun& run)
      : row(run.first_row), k_tile(run.first_k_tile), left(run.last - run.first) {}
  NVFP4_MOE_HOST_DEVICE bool more() const { return left != 0; }
  // The end of the row's subtiles in the run. k_tiles: of the whole row.
  NVFP4_MOE_HOST_DEVICE int32_t end(int32_t k_tiles) const {
    return k_tile + left < k_tiles ? k_tile + left : k_tiles;
  }
  NVFP4_MOE_HOST_DEVICE void advance(int32_t end) {
    left -= end - k_tile;
    ++row, k_tile = 0;
  }
};

}  // namespace nvfp4_moe::internal::sm90
