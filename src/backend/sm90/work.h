// Who multiplies what: a launch's tiles of work, dealt out to its blocks.
//
// A unit is one tile of lines times one group of weight rows over the whole of K, kt chunks of 128 k. With
// units = w * blocks + rest, every block takes w whole units, and the rest is cut into equal runs of chunks, one a
// block as long as a unit is in few enough pieces, so that every multiprocessor reads the same number of weight bytes.
// A unit cut that way leaves fp32 sums of its pieces, which the block that arrives last adds in the order of K: the
// bits depend on the launch, not on who that is. Where that would save a block few chunks, the rest is dealt out in
// whole units too.
//
// Whole units are dealt back and forth, 0 1 2, 2 1 0, 0 1 2: tiles come in the order of their width, and so every block
// gets as much of the wide ones.
#pragma once

#include <cstdint>

#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::sm90 {

// n / divisor for 0 <= n < 2^31 in three instructions: a division is forty, and a block that has just begun waits for
// each of its instructions.
struct Divider {
  uint32_t multiplier, shift;  // multiplier 0: divisor 1

  Divider() = default;
  explicit Divider(int32_t divisor) : multiplier(0), shift(0) {
    if (divisor <= 1) return;
    while ((int64_t{2} << shift) < divisor) ++shift;  // 2^(shift + 1) >= divisor
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) + static_cast<uint32_t>(divisor) - 1) /
                                       static_cast<uint32_t>(divisor));
  }
  NVFP4_MOE_HOST_DEVICE int32_t operator()(int32_t n) const {
    const auto high = static_cast<uint32_t>(uint64_t{static_cast<uint32_t>(n)} * multiplier >> 32);
    return static_cast<int32_t>(multiplier == 0 ? static_cast<uint32_t>(n) : high >> shift);
  }
};

inline constexpr int32_t kTilesTogether = 8;

// What the host knows of a launch's work.
struct WorkShape {
  int32_t groups, chunks_of_unit;
  int32_t blocks;
  bool split;
  int32_t least_saved;                               // chunks that cutting must take from the longest run to be done
  int32_t most_pieces;                               // of a unit, where the blocks would do for more
  int32_t least_run;                                 // chunks of the longest of so many
  Divider by_blocks, by_chunks, by_turn, by_pieces;  // turn: units of kTilesTogether tiles

  WorkShape() = default;
  WorkShape(int32_t groups_, int32_t chunks_, int32_t blocks_, bool split_, int32_t least_saved_, int32_t most_pieces_)
      : groups(groups_),
        chunks_of_unit(chunks_),
        blocks(blocks_),
        split(split_),
        least_saved(least_saved_),
        most_pieces(most_pieces_ < chunks_ ? most_pieces_ : chunks_),
        least_run((chunks_ + most_pieces - 1) / most_pieces),
        by_blocks(blocks_),
        by_chunks(chunks_),
        by_turn(kTilesTogether * groups_),
        by_pieces(most_pieces) {}
};

struct Unit {
  int32_t tile, group;
};
struct Piece {
  Unit unit;
  int32_t first_chunk, chunks;
  int32_t partial;  // where its sums go: -1: the piece is the whole unit
};
// The pieces of a unit that was cut, in the order of K: those of blocks first_block, first_block + 1, ...
struct UnitPieces {
  int32_t first_block, count;
  int32_t first_partial;
  NVFP4_MOE_HOST_DEVICE int32_t partial(int32_t piece) const {
    return piece == 0 ? first_partial : 2 * (first_block + piece);  // a later one's run begins in the unit
  }
};

struct Work {
  WorkShape shape;
  int32_t tiles;
  int32_t whole_units;      // those that are not cut
  int32_t split_chunks;     // of all units that are
  int32_t split_blocks;     // that have a run of them
  int32_t tail_multiplier;  // 2^kTailShift / the tiles of the last turn, rounded up

  NVFP4_MOE_HOST_DEVICE Work(const WorkShape& shape_, int32_t tiles_) : shape(shape_), tiles(tiles_) {
    const int32_t units = tiles * shape.groups;
    whole_units = units;
    split_blocks = shape.blocks;
    if (shape.split) {
      const int32_t rest = units - shape.by_blocks(units) * shape.blocks;
      const bool few = rest * shape.most_pieces < shape.blocks;
      const int32_t run = few ? shape.least_run : shape.by_blocks(rest * shape.chunks_of_unit + shape.blocks - 1);
      if (shape.chunks_of_unit - run >= shape.least_saved) {
        whole_units -= rest;
        if (few) split_blocks = rest * shape.most_pieces;
      }
    }
    split_chunks = (units - whole_units) * shape.chunks_of_unit;
    const int32_t tail = tiles % kTilesTogether;
    tail_multiplier = tail == 0 ? 0 : ((1 << kTailShift) + tail - 1) / tail;
  }

  // Up to eight tiles of lines take turns at a group of weight rows: tiles of one expert then find it in L2.
  NVFP4_MOE_HOST_DEVICE Unit unit(int32_t index) const {
    const int32_t first = shape.by_turn(index) * kTilesTogether;
    const bool full = tiles - first >= kTilesTogether;
    const int32_t here = full ? kTilesTogether : tiles - first;
    const int32_t in = index - first * shape.groups;  // below 2^18: exact
    const int32_t multiplier = full ? (1 << kTailShift) / kTilesTogether : tail_multiplier;
    const auto group = static_cast<int32_t>(int64_t{in} * multiplier >> kTailShift);
    return {first + in - group * here, group};
  }
  // The run of split chunks that is a block's: [split_begin(b), split_begin(b + 1)); empty from split_blocks on.
  NVFP4_MOE_HOST_DEVICE int32_t split_begin(int32_t block) const {
    if (split_blocks == shape.blocks) return shape.by_blocks(split_chunks * block);
    return block < split_blocks ? shape.by_pieces(shape.chunks_of_unit * block) : split_chunks;
  }
  NVFP4_MOE_HOST_DEVICE int32_t block_of(int32_t split_chunk) const {
    return ((split_chunk + 1) * split_blocks - 1) / split_chunks;
  }
  // A run is at most one unit long, so it touches two at most: two places a block.
  NVFP4_MOE_HOST_DEVICE int32_t partial_of(int32_t block, int32_t split_unit) const {
    return 2 * block + split_unit - shape.by_chunks(split_begin(block));
  }
  NVFP4_MOE_HOST_DEVICE UnitPieces pieces_of(int32_t split_unit) const {
    const int32_t begin = split_unit * shape.chunks_of_unit;
    const int32_t first = block_of(begin), last = block_of(begin + shape.chunks_of_unit - 1);
    return {first, last - first + 1, partial_of(first, split_unit)};
  }
  NVFP4_MOE_HOST_DEVICE int32_t chunks_of(int32_t block) const {
    const int32_t rounds = shape.by_blocks(whole_units), last = whole_units - rounds * shape.blocks;
    const int32_t own = rounds + ((rounds % 2 == 0 ? block : shape.blocks - 1 - block) < last);
    return own * shape.chunks_of_unit + split_begin(block + 1) - split_begin(block);
  }

 private:
  static constexpr int kTailShift = 21;
};

// One block's pieces, in order.
class Pieces {
 public:
  NVFP4_MOE_HOST_DEVICE Pieces(const Work& work, int32_t block)
      : work_(work),
        block_(block),
        next_unit_(block),
        next_step_(2 * (work.shape.blocks - block) - 1),
        next_chunk_(work.split_begin(block)),
        end_chunk_(work.split_begin(block + 1)) {}

  NVFP4_MOE_HOST_DEVICE bool next(Piece& piece) {
    const int32_t chunks_of_unit = work_.shape.chunks_of_unit;
    if (next_unit_ < work_.whole_units) {
      piece = {work_.unit(next_unit_), 0, chunks_of_unit, -1};
      next_unit_ += next_step_;
      next_step_ = 2 * work_.shape.blocks - next_step_;
      return true;
    }
    if (next_chunk_ >= end_chunk_) return false;
    const int32_t split_unit = work_.shape.by_chunks(next_chunk_);
    piece.unit = work_.unit(work_.whole_units + split_unit);
    piece.first_chunk = next_chunk_ - split_unit * chunks_of_unit;
    const int32_t left = end_chunk_ - next_chunk_, of_unit = chunks_of_unit - piece.first_chunk;
    piece.chunks = left < of_unit ? left : of_unit;
    piece.partial = piece.chunks == chunks_of_unit ? -1 : work_.partial_of(block_, split_unit);
    next_chunk_ += piece.chunks;
    return true;
  }

 private:
  const Work& work_;
  int32_t block_, next_unit_, next_step_, next_chunk_, end_chunk_;
};

}  // namespace nvfp4_moe::sm90
