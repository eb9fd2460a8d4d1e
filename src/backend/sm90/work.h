// Who multiplies what: a launch's tiles of work, dealt out to its blocks.
//
// A unit is one tile of lines times one group of weight rows over the whole of K, kt chunks of 128 k. With
// units = w * blocks + rest, every block takes w whole units, and the rest is cut into equal runs of chunks, one a
// block, so that every multiprocessor reads the same number of weight bytes. A unit cut that way leaves fp32 sums of
// its pieces, which the block that arrives last adds in the order of K: the bits depend on the launch, not on who that
// is.
#pragma once

#include <cstdint>

#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::sm90 {

struct Unit {
  int32_t tile, group;
};
struct Piece {
  Unit unit;
  int32_t first_chunk, chunks;
  int32_t partial;  // where its sums go: -1: the piece is the whole unit
};

struct Work {
  int32_t tiles, groups, chunks_of_unit;
  int32_t blocks;
  int32_t whole_units;   // those that are not cut
  int32_t split_chunks;  // of all units that are

  NVFP4_MOE_HOST_DEVICE Work(int32_t tiles_, int32_t groups_, int32_t chunks_, int32_t blocks_, bool split)
      : tiles(tiles_), groups(groups_), chunks_of_unit(chunks_), blocks(blocks_) {
    const int32_t units = tiles * groups;
    whole_units = split ? units / blocks * blocks : units;
    split_chunks = (units - whole_units) * chunks_of_unit;
  }

  // Up to eight tiles of lines take turns at a group of weight rows: tiles of one expert then find it in L2.
  NVFP4_MOE_HOST_DEVICE Unit unit(int32_t index) const {
    constexpr int32_t kTilesTogether = 8;
    const int32_t first = index / (kTilesTogether * groups) * kTilesTogether;
    const int32_t here = tiles - first < kTilesTogether ? tiles - first : kTilesTogether;
    const int32_t in = index - first * groups;
    return {first + in % here, in / here};
  }
  // The run of split chunks that is a block's: [split_begin(b), split_begin(b + 1)).
  NVFP4_MOE_HOST_DEVICE int32_t split_begin(int32_t block) const { return split_chunks * block / blocks; }
  NVFP4_MOE_HOST_DEVICE int32_t block_of(int32_t split_chunk) const {
    return ((split_chunk + 1) * blocks - 1) / split_chunks;
  }
  // A run is at most one unit long, so it touches two at most: two places a block.
  NVFP4_MOE_HOST_DEVICE int32_t partial_of(int32_t block, int32_t split_unit) const {
    return 2 * block + split_unit - split_begin(block) / chunks_of_unit;
  }
  // A unit's pieces in the order of K: how many, and where the sums of each are.
  NVFP4_MOE_HOST_DEVICE int32_t pieces_of(int32_t split_unit) const {
    if (split_chunks < blocks) return chunks_of_unit;  // a chunk a block, and some blocks without
    const int32_t begin = split_unit * chunks_of_unit;
    return block_of(begin + chunks_of_unit - 1) - block_of(begin) + 1;
  }
  NVFP4_MOE_HOST_DEVICE int32_t partial_of_piece(int32_t split_unit, int32_t piece) const {
    const int32_t begin = split_unit * chunks_of_unit;
    if (split_chunks < blocks) return 2 * block_of(begin + piece);
    const int32_t first = block_of(begin);
    return piece == 0 ? partial_of(first, split_unit) : 2 * (first + piece);  // a later one's run begins in the unit
  }
  NVFP4_MOE_HOST_DEVICE int32_t chunks_of(int32_t block) const {
    const int32_t own = whole_units / blocks + (block < whole_units % blocks ? 1 : 0);
    return own * chunks_of_unit + split_begin(block + 1) - split_begin(block);
  }
};

// One block's pieces, in order.
class Pieces {
 public:
  NVFP4_MOE_HOST_DEVICE Pieces(const Work& work, int32_t block)
      : work_(work),
        block_(block),
        next_unit_(block),
        next_chunk_(work.split_begin(block)),
        end_chunk_(work.split_begin(block + 1)) {}

  NVFP4_MOE_HOST_DEVICE bool next(Piece& piece) {
    if (next_unit_ < work_.whole_units) {
      piece = {work_.unit(next_unit_), 0, work_.chunks_of_unit, -1};
      next_unit_ += work_.blocks;
      return true;
    }
    if (next_chunk_ >= end_chunk_) return false;
    const int32_t split_unit = next_chunk_ / work_.chunks_of_unit;
    piece.unit = work_.unit(work_.whole_units + split_unit);
    piece.first_chunk = next_chunk_ - split_unit * work_.chunks_of_unit;
    const int32_t left = end_chunk_ - next_chunk_, of_unit = work_.chunks_of_unit - piece.first_chunk;
    piece.chunks = left < of_unit ? left : of_unit;
    piece.partial = piece.chunks == work_.chunks_of_unit ? -1 : work_.partial_of(block_, split_unit);
    next_chunk_ += piece.chunks;
    return true;
  }

 private:
  const Work& work_;
  int32_t block_, next_unit_, next_chunk_, end_chunk_;
};

}  // namespace nvfp4_moe::sm90
