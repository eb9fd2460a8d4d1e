// The scheduler of a GEMM: divides output tiles among the ctas of a persistent launch, as work
// tiles.
//
// An output tile is one tile of rows times one tile of weight rows, over all of K, which is
// k_blocks of 128 k. With tiles = w * ctas + rest, every cta gets w whole tiles. The rest is split
// along K into equal runs of k-blocks, one per cta if that does not give a tile too many splits, so
// that every multiprocessor reads the same number of weight bytes. A split tile leaves fp32
// partials, which the cta that arrives last adds in the order of K: the bits depend on the launch,
// not on which cta that is. If splitting would save a cta only few k-blocks, the rest is dealt out
// as whole tiles too.
//
// Whole tiles are dealt back and forth (0 1 2, 2 1 0, 0 1 2): they are sorted by width, so every
// cta gets an equal share of the wide ones.
//
// Everything here is value arithmetic, the same on the host and on the device.
#pragma once

#include <cstdint>

#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::internal::cuda {

// n / divisor for 0 <= n < 2^31 in three instructions. A division takes forty, and a cta that has
// just started waits for each of its instructions to be fetched.
struct Divider {
  uint32_t multiplier, shift;  // multiplier 0: divisor 1

  Divider() = default;
  explicit Divider(int32_t divisor) : multiplier(0), shift(0) {
    if (divisor <= 1) return;
    while ((int64_t{2} << shift) < divisor) ++shift;  // 2^(shift + 1) >= divisor
    multiplier =
        static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) + static_cast<uint32_t>(divisor) - 1) /
                              static_cast<uint32_t>(divisor));
  }
  NVFP4_MOE_HOST_DEVICE int32_t operator()(int32_t n) const {
    const auto high = static_cast<uint32_t>(uint64_t{static_cast<uint32_t>(n)} * multiplier >> 32);
    return static_cast<int32_t>(multiplier == 0 ? static_cast<uint32_t>(n) : high >> shift);
  }
};

// The number of tiles of rows that are processed in sequence for one tile of weight rows.
inline constexpr int32_t kRasterTiles = 8;

// A launch's work as far as the host knows it: everything except the number of tiles of rows, which
// route determines on the device.
struct ScheduleParams {
  int32_t m_tiles, k_blocks;  // tiles of weight rows; k-blocks of K
  int32_t ctas;
  bool split_k;
  int32_t min_saved_k_blocks;  // minimum that splitting must save of the longest run
  int32_t max_splits;          // per tile, even if there are ctas for more
  int32_t min_split_k_blocks;  // length of the longest of max_splits splits
  Divider by_ctas, by_k_blocks, by_raster,
      by_max_splits;  // raster: the output tiles of kRasterTiles tiles of rows

  ScheduleParams() = default;
  ScheduleParams(int32_t m_tiles_, int32_t k_blocks_, int32_t ctas_, bool split_k_,
                 int32_t min_saved_k_blocks_, int32_t max_splits_)
      : m_tiles(m_tiles_),
        k_blocks(k_blocks_),
        ctas(ctas_),
        split_k(split_k_),
        min_saved_k_blocks(min_saved_k_blocks_),
        max_splits(max_splits_ < k_blocks_ ? max_splits_ : k_blocks_),
        min_split_k_blocks((k_blocks_ + max_splits - 1) / max_splits),
        by_ctas(ctas_),
        by_k_blocks(k_blocks_),
        by_raster(kRasterTiles * m_tiles_),
        by_max_splits(max_splits) {}
};

struct OutputTile {
  int32_t n_tile, m_tile;  // indices of a tile of rows and of a tile of weight rows
};
// A cta's work between two epilogues: an output tile over a range of K.
struct WorkTile {
  OutputTile tile;
  int32_t first_k_block, k_blocks;
  // index of the partial for its accumulators; -1: the work tile is a whole output tile
  int32_t partial;
};
// The splits of an output tile in the order of K: those of ctas first_cta, first_cta + 1, ...
struct TileSplits {
  int32_t first_cta, count;
  int32_t first_partial;
  NVFP4_MOE_HOST_DEVICE int32_t partial(int32_t split) const {
    return split == 0 ? first_partial
                      : 2 * (first_cta + split);  // a later cta's run begins in this tile
  }
};

struct Schedule {
  ScheduleParams params;
  int32_t n_tiles;
  int32_t whole_tiles;     // output tiles that are not split
  int32_t split_k_blocks;  // in all split output tiles
  int32_t split_ctas;      // that have a run of them
  // 2^kTailShift / the number of tiles of rows in the last raster, rounded up
  int32_t tail_multiplier;

  NVFP4_MOE_HOST_DEVICE Schedule(const ScheduleParams& params_, int32_t n_tiles_)
      : params(params_), n_tiles(n_tiles_) {
    const int32_t tiles = n_tiles * params.m_tiles;
    whole_tiles = tiles;
    split_ctas = params.ctas;
    if (params.split_k) {
      const int32_t rest = tiles - params.by_ctas(tiles) * params.ctas;
      const bool most_split = rest * params.max_splits < params.ctas;  // ctas are left over
      const int32_t longest = most_split ? params.min_split_k_blocks
                                         : params.by_ctas(rest * params.k_blocks + params.ctas - 1);
      if (params.k_blocks - longest >= params.min_saved_k_blocks) {
        whole_tiles -= rest;
        if (most_split) split_ctas = rest * params.max_splits;
      }
    }
    split_k_blocks = (tiles - whole_tiles) * params.k_blocks;
    const int32_t tail = n_tiles % kRasterTiles;
    tail_multiplier = tail == 0 ? 0 : ((1 << kTailShift) + tail - 1) / tail;
  }

  // Up to kRasterTiles tiles of rows are processed in sequence for a tile of weight rows, so those
  // of one expert find it in L2.
  NVFP4_MOE_HOST_DEVICE OutputTile output_tile(int32_t index) const {
    const int32_t first = params.by_raster(index) * kRasterTiles;
    const bool full = n_tiles - first >= kRasterTiles;
    const int32_t raster_tiles = full ? kRasterTiles : n_tiles - first;
    const int32_t offset = index - first * params.m_tiles;  // below 2^18: exact
    const int32_t multiplier = full ? (1 << kTailShift) / kRasterTiles : tail_multiplier;
    const auto m_tile = static_cast<int32_t>(int64_t{offset} * multiplier >> kTailShift);
    return {first + offset - m_tile * raster_tiles, m_tile};
  }
  // A cta's run of split k-blocks: [split_begin(c), split_begin(c + 1)); empty from split_ctas on.
  NVFP4_MOE_HOST_DEVICE int32_t split_begin(int32_t cta) const {
    if (split_ctas == params.ctas) return params.by_ctas(split_k_blocks * cta);
    return cta < split_ctas ? params.by_max_splits(params.k_blocks * cta) : split_k_blocks;
  }
  NVFP4_MOE_HOST_DEVICE int32_t cta_of(int32_t split_k_block) const {
    return ((split_k_block + 1) * split_ctas - 1) / split_k_blocks;
  }
  // A run is at most one tile long, so it overlaps at most two tiles: two partials per cta.
  NVFP4_MOE_HOST_DEVICE int32_t partial_of(int32_t cta, int32_t split_tile) const {
    return 2 * cta + split_tile - params.by_k_blocks(split_begin(cta));
  }
  NVFP4_MOE_HOST_DEVICE TileSplits splits_of(int32_t split_tile) const {
    const int32_t begin = split_tile * params.k_blocks;
    const int32_t first = cta_of(begin), last = cta_of(begin + params.k_blocks - 1);
    return {first, last - first + 1, partial_of(first, split_tile)};
  }
  NVFP4_MOE_HOST_DEVICE int32_t k_blocks_of(int32_t cta) const {
    const int32_t rounds = params.by_ctas(whole_tiles), last = whole_tiles - rounds * params.ctas;
    const int32_t own = rounds + ((rounds % 2 == 0 ? cta : params.ctas - 1 - cta) < last);
    return own * params.k_blocks + split_begin(cta + 1) - split_begin(cta);
  }

 private:
  static constexpr int kTailShift = 21;
};

// One cta's work tiles, in order.
class WorkTileIterator {
 public:
  NVFP4_MOE_HOST_DEVICE WorkTileIterator(const Schedule& schedule, int32_t cta)
      : schedule_(schedule),
        cta_(cta),
        next_tile_(cta),
        next_step_(2 * (schedule.params.ctas - cta) - 1),
        next_k_block_(schedule.split_begin(cta)),
        end_k_block_(schedule.split_begin(cta + 1)) {}

  NVFP4_MOE_HOST_DEVICE bool next(WorkTile& work) {
    const int32_t k_blocks = schedule_.params.k_blocks;
    if (next_tile_ < schedule_.whole_tiles) {
      work = {schedule_.output_tile(next_tile_), 0, k_blocks, -1};
      next_tile_ += next_step_;
      next_step_ = 2 * schedule_.params.ctas - next_step_;
      return true;
    }
    if (next_k_block_ >= end_k_block_) return false;
    const int32_t split_tile = schedule_.params.by_k_blocks(next_k_block_);
    work.tile = schedule_.output_tile(schedule_.whole_tiles + split_tile);
    work.first_k_block = next_k_block_ - split_tile * k_blocks;
    const int32_t left = end_k_block_ - next_k_block_, of_tile = k_blocks - work.first_k_block;
    work.k_blocks = left < of_tile ? left : of_tile;
    work.partial = work.k_blocks == k_blocks ? -1 : schedule_.partial_of(cta_, split_tile);
    next_k_block_ += work.k_blocks;
    return true;
  }

 private:
  const Schedule& schedule_;
  int32_t cta_, next_tile_, next_step_, next_k_block_, end_k_block_;
};

}  // namespace nvfp4_moe::internal::cuda
