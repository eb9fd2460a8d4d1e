// The loading warpgroup: weights, lines of activations and their factors into the ring of stages.
#pragma once

#include <cstdint>

#include "backend/sm90/barrier.cuh"
#include "backend/sm90/shape.cuh"
#include "backend/sm90/work.h"

namespace nvfp4_moe::sm90 {

template <class S>
__device__ void load_weights(const GemmArgs& args, const Work& work) {
  const uint64_t policy = evict_first_policy();
  Pieces pieces(work, static_cast<int32_t>(blockIdx.x));
  RingPlace<S::kStages> place;
  const int64_t row_tile_bytes = int64_t{args.k_tiles} * cuda::kTileBytes;
  for (Piece piece; pieces.next(piece);) {
    const int32_t expert = args.tiles != nullptr ? args.tiles[piece.unit.tile].expert : 0;
    const int32_t first_block = piece.unit.group * S::kRowBlocks;
    const int32_t blocks = min(S::kRowBlocks, args.row_tiles - first_block);
    const uint8_t* from = args.weights + expert * args.expert_stride + first_block * row_tile_bytes +
                          piece.first_chunk * cuda::kTileBytes;
    for (int32_t chunk = 0; chunk < piece.chunks; ++chunk, from += cuda::kTileBytes, place = place.next()) {
      wait(SharedPlaces<S>::empty(place.stage), place.parity ^ 1);
      const uint32_t barrier = SharedPlaces<S>::full(place.stage);
      const uint32_t to = shared_address(SharedPlaces<S>::stage(place.stage)) + S::kLineBytes;
      arrive_expecting(barrier, static_cast<uint32_t>(blocks * cuda::kTileBytes));
#pragma unroll
      for (int b = 0; b < S::kRowBlocks; ++b)
        if (b < blocks)
          copy_bulk(to + b * cuda::kTileBytes, from + b * row_tile_bytes, cuda::kTileBytes, barrier, policy);
    }
  }
}

inline constexpr int kLineThreads = 96;
inline constexpr int kLineWarps = kLineThreads / 32;

template <class S, class Epilogue>
__device__ void load_lines(const GemmArgs& args, const Epilogue& epilogue, const Work& work) {
  constexpr int kPieces = 256 / 16;  // of 16 bytes in a line's 128 k
  constexpr int kLinesAtOnce = kLineThreads / kPieces;
  constexpr int kPeriod = 4;  // 4 x 6 lines are whole groups of eight
  constexpr int kBatch = S::kLines <= 64 ? (S::kLines + kLinesAtOnce - 1) / kLinesAtOnce : 3 * kPeriod;
  static_assert(kLinesAtOnce * kPeriod % 8 == 0);
  const int thread = static_cast<int>(threadIdx.x) - kMathThreads - 32;
  const int column = thread % kPieces, own_line = thread / kPieces;
  const bool leader = thread % 32 == 0;
  // Line i's 16 bytes `column % 8` of a half lie at column ^ i, so that eight lines fill all banks.
  uint32_t places[kPeriod];
#pragma unroll
  for (int b = 0; b < kPeriod; ++b) {
    const int i = own_line + b * kLinesAtOnce;
    places[b] = static_cast<uint32_t>(column / 8 * S::kHalfLineBytes + i * 128 + ((column ^ i) & 7) * 16);
  }
  Pieces pieces(work, static_cast<int32_t>(blockIdx.x));
  RingPlace<S::kStages> place;
  uint32_t unit = 0;
  for (Piece piece; pieces.next(piece); ++unit) {
    const TileRows rows = rows_of_tile<S::kLines>(args, piece.unit.tile);
    int32_t* const lines = SharedPlaces<S>::lines(unit);
    LineFactor* const factors = SharedPlaces<S>::factors(unit);
    wait(SharedPlaces<S>::factors_free(unit), (unit / 2 & 1) ^ 1);
    for (int i = thread; i < rows.count; i += kLineThreads) {
      const int64_t row = rows.first + i;
      const int32_t choice = args.choice_of_row != nullptr ? args.choice_of_row[row] : static_cast<int32_t>(row);
      const int32_t line = args.choice_of_row != nullptr ? choice / args.top_k : choice;
      lines[i] = line;
      factors[i] = epilogue.factor(line, choice);
    }
    if (thread == 0)
      SharedPlaces<S>::piece(unit) = {rows, epilogue.scales(rows.expert), piece.unit.group * S::kRowBlocks * 128,
                                      piece.chunks, piece.partial};
    sync_threads<1, kLineThreads>();
    for (int32_t chunk = 0; chunk < piece.chunks; ++chunk, place = place.next()) {
      const int32_t k = (piece.first_chunk + chunk) * cuda::kTileK + column * 8;
      const bool valid = k < args.k;
      const uint16_t* const from = args.x + (valid ? k : 0);
      wait(SharedPlaces<S>::empty(place.stage), place.parity ^ 1);
      const uint32_t stage = shared_address(SharedPlaces<S>::stage(place.stage));
#pragma unroll 1
      for (int first = 0; first < rows.count; first += kBatch * kLinesAtOnce) {
        int32_t line[kBatch];  // read at once, since no read may pass a copy
#pragma unroll
        for (int b = 0; b < kBatch; ++b) line[b] = lines[own_line + first + b * kLinesAtOnce];
#pragma unroll
        for (int b = 0; b < kBatch; ++b)
          copy_line(stage + places[b % kPeriod] + (first + b / kPeriod * kPeriod * kLinesAtOnce) * 128,
                    from + int64_t{line[b]} * args.k, valid, own_line + first + b * kLinesAtOnce < rows.count);
      }
      const uint32_t barrier = SharedPlaces<S>::full(place.stage);
      arrive_after_copies(barrier);
      __syncwarp();
      arrive_if(barrier, leader);  // what the warp wrote itself: the piece, factors
    }
  }
}

}  // namespace nvfp4_moe::sm90
