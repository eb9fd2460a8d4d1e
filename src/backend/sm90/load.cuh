// The loading warpgroup: weights, lines of activations and their factors into the ring of stages.
//
//   warp 0, one thread   weights: bulk copies of whole packed tiles. In a variant with tensor_lines the lines too, in
//                        boxes: they lie in the order of the rows already
//   warps 1-3            what a piece is and its line factors. In the other variants the lines, gathered by 16 bytes
//
// Both ways leave the 128-byte swizzle that wgmma reads. Lines beyond a tile's count reach columns that nobody reads;
// of gathered ones those that are multiplied all the same are zeros, which take the least power. k beyond K is filled
// with zeros, since 0 times a stale NaN is NaN.
#pragma once

#include <cstdint>

#include "backend/cuda/device/launch.cuh"
#include "backend/sm90/barrier.cuh"
#include "backend/sm90/shape.cuh"
#include "backend/sm90/work.h"

namespace nvfp4_moe::sm90 {

// A block's pieces with their rows. look_ahead() reads the next one's: the ring must not run dry on them, and the first
// piece's copies must not wait for the second's.
template <class S, bool kHere>
class PiecesAhead {
 public:
  __device__ PiecesAhead(const GemmArgs& args, const Work& work)
      : args_(args), pieces_(work, static_cast<int32_t>(blockIdx.x)) {
    look_ahead();
  }
  __device__ bool next(Piece& piece, TileRows& rows) const {
    piece = piece_;
    rows = rows_;
    return more_;
  }
  __device__ void look_ahead() {
    more_ = pieces_.next(piece_);
    if (more_) rows_ = rows_of_tile<S, kHere>(args_, piece_.unit.tile);
  }

 private:
  const GemmArgs& args_;
  Pieces pieces_;
  Piece piece_;
  TileRows rows_;
  bool more_;
};

// One thread.
template <class S, class Lines>
__device__ void load_copies(const GemmArgs& args, const Lines& source, const Work& work) {
  const uint64_t policy = cache_policy<!S::kIs.tensor_lines>();  // wide: other tiles read the same weights
  PiecesAhead<S, Lines::kRoutesHere> pieces(args, work);
  RingPlace<S::kStages> place;
  const int64_t row_tile_bytes = int64_t{args.k_tiles} * cuda::kTileBytes;
  // Weights before the kernel may wait, and before its first lines are on their way: with more in flight these and what
  // leads to them come later. Behind requantize there is time for all that fit.
  constexpr int kEarlyBytes = 54 * 1024, kWeightBytes = S::kRowBlocks * static_cast<int>(cuda::kTileBytes);
  int early = S::kIs.tensor_lines ? 0 : args.waits_long && S::kRowBlocks > 2 ? S::kStages : kEarlyBytes / kWeightBytes;
  Piece piece;
  for (TileRows rows; pieces.next(piece, rows);) {
    const int32_t first_block = piece.unit.group * S::kRowBlocks;
    const int32_t blocks = min(S::kRowBlocks, args.row_tiles - first_block);
    const uint8_t* from = args.weights + rows.expert * args.expert_stride + first_block * row_tile_bytes +
                          piece.first_chunk * cuda::kTileBytes;
    auto bytes = static_cast<uint32_t>(blocks * cuda::kTileBytes);
    int32_t boxes = 0;
    if constexpr (S::kIs.tensor_lines) {
      boxes = (rows.count + kBoxLines - 1) / kBoxLines;
      bytes += static_cast<uint32_t>(2 * boxes * kBoxBytes);
    }
    for (int32_t chunk = 0; chunk < piece.chunks; ++chunk, from += cuda::kTileBytes, place = place.next()) {
      if (early-- == 0) {
        if constexpr (!Lines::kRoutesHere) cuda::wait_for_previous();
        if constexpr (!S::kIs.tensor_lines) wait(SharedPlaces<S>::begun(), 0);
      }
      wait(SharedPlaces<S>::empty(place.stage), place.parity ^ 1);
      const uint32_t barrier = SharedPlaces<S>::full(place.stage);
      const uint32_t stage = shared_address(SharedPlaces<S>::stage(place.stage));
      arrive_expecting(barrier, bytes);
#pragma unroll
      for (int b = 0; b < S::kRowBlocks; ++b)
        if (b < blocks)
          copy_bulk(stage + S::kLineBytes + b * cuda::kTileBytes, from + b * row_tile_bytes, cuda::kTileBytes, barrier,
                    policy);
      if constexpr (S::kIs.tensor_lines) {
        const int32_t k = (piece.first_chunk + chunk) * cuda::kTileK;
#pragma unroll 1
        for (int32_t box = 0; box < boxes; ++box) {
          const uint32_t to = stage + box * kBoxBytes;
          const int32_t line = static_cast<int32_t>(rows.first) + box * kBoxLines;
          copy_box(to, source.map, k, line, barrier);
          copy_box(to + S::kHalfLineBytes, source.map, k + kBoxK, line, barrier);
        }
      }
      if (chunk == 0) pieces.look_ahead();
    }
  }
}

inline constexpr int kLineThreads = 96;

// What the math warpgroups have to know of a piece and of its lines. All line threads, in two halves: copies of lines
// do not wait for reads that only the math needs.
template <class S, class Epilogue, class Lines>
class Description {
 public:
  // Where the line warps find the lines. Under kFactorsLater a thread has one line at most, and what it may find before
  // the kernels before this one have ended, it finds before.
  __device__ Description(const GemmArgs& args, const Epilogue& epilogue, const Lines& source, const Piece& piece,
                         uint32_t index, int thread)
      : epilogue_(epilogue),
        index_(index),
        thread_(thread),
        rows_(rows_of_tile<S, Lines::kRoutesHere>(args, piece.unit.tile)) {
    wait(SharedPlaces<S>::piece_free(index), (index / 2 & 1) ^ 1);
    if constexpr (S::kFactorsLater) {
      if constexpr (Lines::kRoutesHere) waits_later_ = index == 0 && source.early;
      if (has_line()) find_line(args, thread);
      publish(piece);
      if (index == 0 && !waits_later_) cuda::wait_for_previous();
      if (has_line() && !waits_later_) read_scales();
    } else {
      if (index == 0) cuda::wait_for_previous();
      for (int i = thread; i < rows_.count; i += kLineThreads) {
        find_line(args, i);
        read_scales();
        SharedPlaces<S>::factors(index)[i] = LineFactor(scale_, scales_);
      }
    }
  }
  __device__ const TileRows& rows() const { return rows_; }
  // The chunk of a piece with whose copies the second half comes: it waits for route where the first did not, and then
  // all stages' copies go before it.
  __device__ int32_t completed_with(const Piece& piece) const {
    return waits_later_ ? min(piece.chunks, S::kStages) - 1 : 0;
  }
  __device__ void complete(const Piece& piece) {
    if constexpr (S::kFactorsLater) {
      if (waits_later_) cuda::wait_for_previous();
      if (has_line() && waits_later_) read_scales();
      if (has_line()) SharedPlaces<S>::factors(index_)[thread_] = LineFactor(scale_, scales_);
      arrive(SharedPlaces<S>::factors_full(index_));
    } else {
      publish(piece);
    }
  }

 private:
  __device__ bool has_line() const { return thread_ < rows_.count; }
  __device__ void find_line(const GemmArgs& args, int i) {
    const int64_t row = rows_.first + i;
    if constexpr (Lines::kRoutesHere)
      choice_ = SharedPlaces<S>::few().assignment_of_row[row];
    else
      choice_ = args.assignment_of_row != nullptr ? __ldcg(args.assignment_of_row + row) : static_cast<int32_t>(row);
    line_ = Lines::kRoutesHere || args.assignment_of_row != nullptr ? args.by_top_k(choice_) : choice_;
    if constexpr (!S::kIs.tensor_lines) SharedPlaces<S>::lines(index_)[i] = line_;
  }
  __device__ void read_scales() {
    scale_ = epilogue_.line_scale_of(line_, choice_);
    scales_ = epilogue_.scales(rows_.expert);
  }
  __device__ void publish(const Piece& piece) const {
    if (thread_ == 0)
      SharedPlaces<S>::piece(index_) = {rows_, piece.unit.group * S::kRowBlocks * 128, piece.chunks, piece.partial};
    arrive(SharedPlaces<S>::piece_full(index_));
  }
  static_assert(S::kFactorsLater || !Lines::kRoutesHere);
  const Epilogue& epilogue_;
  uint32_t index_;
  int thread_;
  bool waits_later_ = false;
  TileRows rows_;
  int32_t choice_ = 0, line_ = 0;
  LineScale scale_{};
  ExpertScales scales_{};
};

template <class S, class Epilogue>
__device__ void load_lines(const GemmArgs& args, const Epilogue& epilogue, const TensorLines& source,
                           const Work& work) {
  const int thread = static_cast<int>(threadIdx.x) - S::kMathThreads - 32;
  Pieces pieces(work, static_cast<int32_t>(blockIdx.x));
  uint32_t index = 0;
  for (Piece piece; pieces.next(piece); ++index)
    Description<S, Epilogue, TensorLines>(args, epilogue, source, piece, index, thread).complete(piece);
}

// Lines: CopiedLines or ChosenLines.
template <class S, class Epilogue, class Lines>
__device__ void load_lines(const GemmArgs& args, const Epilogue& epilogue, const Lines& source, const Work& work) {
  constexpr int kPieces = 256 / 16;  // of 16 bytes in a line's 128 k
  constexpr int kLinesAtOnce = kLineThreads / kPieces;
  constexpr int kPeriod = 4;  // 4 x 6 lines are whole groups of eight
  constexpr int kBatch = S::kLines <= 64 ? (S::kLines + kLinesAtOnce - 1) / kLinesAtOnce : 3 * kPeriod;
  static_assert(kLinesAtOnce * kPeriod % 8 == 0);
  const int thread = static_cast<int>(threadIdx.x) - S::kMathThreads - 32;
  const int column = thread % kPieces, own_line = thread / kPieces;
  // Line i's 16 bytes `column % 8` of a half lie at column ^ i, so that eight lines fill all banks.
  uint32_t places[kPeriod];
#pragma unroll
  for (int b = 0; b < kPeriod; ++b) {
    const int i = own_line + b * kLinesAtOnce;
    places[b] = static_cast<uint32_t>(column / 8 * S::kHalfLineBytes + i * 128 + ((column ^ i) & 7) * 16);
  }
  Pieces pieces(work, static_cast<int32_t>(blockIdx.x));
  RingPlace<S::kStages> place;
  uint32_t index = 0;
  for (Piece piece; pieces.next(piece); ++index) {
    Description<S, Epilogue, Lines> description(args, epilogue, source, piece, index, thread);
    const TileRows& rows = description.rows();
    sync_threads<kLineThreads>(1);
    const int32_t* const lines = SharedPlaces<S>::lines(index);
    const int eights = S::kRowBlocks > 2 ? (rows.count + 7) / 8 * 8 : rows.count;
    for (int32_t chunk = 0; chunk < piece.chunks; ++chunk, place = place.next()) {
      const int32_t k = (piece.first_chunk + chunk) * cuda::kTileK + column * 8;
      const bool valid = k < source.k;
      const uint16_t* const from = source.x + (valid ? k : 0);
      wait(SharedPlaces<S>::empty(place.stage), place.parity ^ 1);
      const uint32_t stage = shared_address(SharedPlaces<S>::stage(place.stage));
      const int written = chunk < S::kStages ? eights : rows.count;  // then the zeros are there
#pragma unroll 1
      for (int first = 0; first < rows.count; first += kBatch * kLinesAtOnce) {
        int32_t line[kBatch];  // read at once, since no read may pass a copy
#pragma unroll
        for (int b = 0; b < kBatch; ++b) line[b] = lines[own_line + first + b * kLinesAtOnce];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int i = own_line + first + b * kLinesAtOnce;
          const bool has_row = i < rows.count;
          copy_line(stage + places[b % kPeriod] + (first + b / kPeriod * kPeriod * kLinesAtOnce) * 128,
                    has_row ? from + int64_t{line[b]} * source.k : from, valid && has_row, i < written);
        }
      }
      arrive_after_copies(SharedPlaces<S>::full(place.stage));
      if (chunk == 0 && index == 0) arrive(SharedPlaces<S>::begun());
      if (chunk == description.completed_with(piece)) description.complete(piece);
    }
  }
}

}  // namespace nvfp4_moe::sm90
