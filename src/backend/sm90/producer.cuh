// The producer warpgroup: loads weights, rows of activations and their factors into the stages.
//
//   warp 0, one thread   weights: bulk copies of whole packed tiles; under kTmaRows also the rows,
//                        by TMA tiles
//   warps 1-3            work tile infos and row factors; without kTmaRows also the rows, gathered
//                        by 16 bytes per thread, or requantized (requantize.cuh)
//
// In all cases rows have the 128-byte swizzle that wgmma reads. Rows beyond a tile's count only
// affect columns that nobody reads. If gathered rows beyond it are multiplied anyway, they are
// zeros, which takes the least power. k beyond K is filled with zeros, since 0 times a stale NaN is
// NaN.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/cp_async.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/named_barrier.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/tma.cuh"
#include "backend/sm90/shared.cuh"

namespace nvfp4_moe::internal::sm90 {

// kFused: uses the routing that the cta has computed itself.
template <class Traits, bool kFused>
__device__ TileRows rows_of_tile(const GemmArgs& args, int32_t n_tile) {
  if constexpr (kFused) {
    const cuda::RowTile& tile = shared<Traits>().routing.row_tiles[n_tile];
    return {tile.first_row, tile.expert, tile.rows};
  }
  return cuda::rows_of_tile<Traits::kTileN>({args.row_tiles, args.row_tile_count, args.row_offsets},
                                            n_tile);
}
template <class Traits>
__device__ int32_t count_row_tiles(const GemmArgs& args) {
  return cuda::count_row_tiles<Traits::kTileN>(
      {args.row_tiles, args.row_tile_count, args.row_offsets});
}

// A cta's work tiles with their rows. read_ahead() reads the next one: the pipeline must not run
// dry meanwhile, and the first work tile's copies must not wait for reads of the second.
template <class Traits, bool kFused>
class WorkTilesAhead {
 public:
  __device__ WorkTilesAhead(const GemmArgs& args, const Schedule& schedule)
      : args_(args), work_tiles_(schedule, static_cast<int32_t>(blockIdx.x)) {
    read_ahead();
  }
  __device__ bool next(WorkTile& work, TileRows& rows) const {
    work = work_;
    rows = rows_;
    return more_;
  }
  __device__ void read_ahead() {
    more_ = work_tiles_.next(work_);
    if (more_) rows_ = rows_of_tile<Traits, kFused>(args_, work_.tile.n_tile);
  }

 private:
  const GemmArgs& args_;
  WorkTileIterator work_tiles_;
  WorkTile work_;
  TileRows rows_;
  bool more_;
};

// The role of warp 0's first thread.
template <class Traits, class Rows>
__device__ void produce_weights(const GemmArgs& args, const Rows& source,
                                const Schedule& schedule) {
  constexpr int kStages = Shared<Traits>::kStages;
  const uint64_t read_once = ptx::create_policy_evict_first();
  const uint64_t read_again = Traits::kWide ? ptx::create_policy_evict_normal() : read_once;
  WorkTilesAhead<Traits, Rows::kFusedRouting> work_tiles(args, schedule);
  PipelineState<kStages> state;
  const int64_t m_block_bytes = int64_t{args.k_blocks} * cuda::kTileBytes;
  // Stages of weights that are requested before the kernel waits for its predecessor and before its
  // first rows are requested. With more in flight, the rows' copies, and the reads that lead to
  // them, would be delayed. After requantize there is time for all stages.
  constexpr int kEarlyBytes = 54 * 1024,
                kWeightBytes = Traits::kMBlocks * static_cast<int>(cuda::kTileBytes);
  int early = Traits::kTmaRows                                    ? 0
              : args.waits_for_requantize && Traits::kMBlocks > 2 ? kStages
                                                                  : kEarlyBytes / kWeightBytes;
  WorkTile work;
  for (TileRows rows; work_tiles.next(work, rows);) {
    const int32_t first_m_block = work.tile.m_tile * Traits::kMBlocks;
    const int32_t m_blocks = min(Traits::kMBlocks, args.m_blocks - first_m_block);
    const uint8_t* from = args.weights + rows.expert * args.expert_stride +
                          first_m_block * m_block_bytes + work.first_k_block * cuda::kTileBytes;
    auto bytes = static_cast<uint32_t>(m_blocks * cuda::kTileBytes);
    // If an expert has several wide tiles, each has more than half the maximum rows. Other ctas
    // then read its weights soon.
    const uint64_t policy =
        Traits::kWide && rows.count > Traits::kTileN / 2 ? read_again : read_once;
    int32_t tma_tiles = 0;
    if constexpr (Traits::kTmaRows) {
      tma_tiles = (rows.count + kTmaTileRows - 1) / kTmaTileRows;
      bytes += static_cast<uint32_t>(Traits::kSlices * tma_tiles * kTmaTileBytes);
    }
    for (int32_t k_block = 0; k_block < work.k_blocks;
         ++k_block, from += cuda::kTileBytes, state = state.next()) {
      if (early-- == 0) {
        if constexpr (!Rows::kFusedRouting) ptx::grid_dependency_wait();
        if constexpr (!Traits::kTmaRows) ptx::mbarrier_wait(first_rows_barrier<Traits>(), 0);
      }
      ptx::mbarrier_wait(empty_barrier<Traits>(state.stage), state.parity ^ 1);
      const uint32_t full = full_barrier<Traits>(state.stage);
      const uint32_t stage = ptx::shared_address(stage_bytes<Traits>(state.stage));
      ptx::mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll
      for (int m = 0; m < Traits::kMBlocks; ++m)
        if (m < m_blocks)
          ptx::copy_bulk(stage + kWeightsOffset<Traits> + m * cuda::kTileBytes,
                         from + m * m_block_bytes, cuda::kTileBytes, full, policy);
      if constexpr (Traits::kTmaRows) {
        const int32_t at = (work.first_k_block + k_block) * Traits::kSlices * kTmaTileBytesOfRow;
#pragma unroll 1
        for (int32_t tile = 0; tile < tma_tiles; ++tile) {
          const uint32_t to = stage + tile * kTmaTileBytes;
          const int32_t row = static_cast<int32_t>(rows.first) + tile * kTmaTileRows;
#pragma unroll
          for (int slice = 0; slice < Traits::kSlices; ++slice)
            ptx::copy_tensor_2d(to + slice * Traits::kSliceBytes, source.map,
                                at + slice * kTmaTileBytesOfRow, row, full);
        }
      }
      if (k_block == 0) work_tiles.read_ahead();
    }
  }
}

// Tells the consumers about a work tile and its rows. All row threads take part. It is computed in
// two halves, so that copies of rows do not wait for reads that only the consumers need.
template <class Traits, class Epilogue, class Rows>
class Description {
 public:
  // The first half: finds the rows for the row threads. Under kLateFactors a thread has at most one
  // row, and reads whatever it can before the preceding kernels have ended.
  __device__ Description(const GemmArgs& args, const Epilogue& epilogue, const Rows& source,
                         const WorkTile& work, uint32_t index, int thread)
      : epilogue_(epilogue),
        index_(index),
        thread_(thread),
        rows_(rows_of_tile<Traits, Rows::kFusedRouting>(args, work.tile.n_tile)) {
    ptx::mbarrier_wait(info_empty_barrier<Traits>(index), (index / 2 & 1) ^ 1);
    if constexpr (Traits::kLateFactors) {
      if constexpr (Rows::kFusedRouting) waits_later_ = index == 0 && source.x_is_input;
      if (has_row()) find_row(args, thread);
      publish(work);
      if (index == 0 && !waits_later_) ptx::grid_dependency_wait();
      if (has_row() && !waits_later_) read_scales();
    } else {
      if (index == 0) ptx::grid_dependency_wait();
      for (int i = thread; i < rows_.count; i += kProducerRowThreads) {
        find_row(args, i);
        read_scales();
        row_factors<Traits>(index)[i] = RowFactor(row_scale_, expert_scales_);
      }
    }
  }
  __device__ const TileRows& rows() const { return rows_; }
  // The k-block after whose copies the second half runs. If the first half did not wait for route,
  // the second half does, and then it comes after the copies of all stages.
  __device__ int32_t completed_with(const WorkTile& work) const {
    return waits_later_ ? min(work.k_blocks, Shared<Traits>::kStages) - 1 : 0;
  }
  // For the thread's row, whose scale is found between the two halves.
  __device__ void scale_row(float scale) { row_scale_ = {scale, 1.0f}; }
  __device__ void complete(const WorkTile& work) {
    if constexpr (Traits::kLateFactors) {
      if (waits_later_) ptx::grid_dependency_wait();
      if (has_row() && waits_later_) read_scales();
      if (has_row()) row_factors<Traits>(index_)[thread_] = RowFactor(row_scale_, expert_scales_);
      ptx::mbarrier_arrive(factors_full_barrier<Traits>(index_));
    } else {
      publish(work);
    }
  }

 private:
  __device__ bool has_row() const { return thread_ < rows_.count; }
  __device__ void find_row(const GemmArgs& args, int i) {
    const int64_t row = rows_.first + i;
    if constexpr (Rows::kFusedRouting)
      assignment_ = shared<Traits>().routing.assignment_of_row[row];
    else
      assignment_ = args.assignment_of_row != nullptr ? __ldcg(args.assignment_of_row + row)
                                                      : static_cast<int32_t>(row);
    token_ = Rows::kFusedRouting || args.assignment_of_row != nullptr ? args.by_top_k(assignment_)
                                                                      : assignment_;
    if constexpr (!Traits::kTmaRows && !Rows::kRequantizes) row_tokens<Traits>(index_)[i] = token_;
  }
  __device__ void read_scales() {
    if constexpr (!Rows::kRequantizes) row_scale_ = epilogue_.row_scale_of(token_, assignment_);
    expert_scales_ = epilogue_.scales(rows_.expert);
  }
  __device__ void publish(const WorkTile& work) const {
    if (thread_ == 0)
      work_tile_info<Traits>(index_) = {rows_, work.tile.m_tile * Traits::kMBlocks * 128,
                                        work.k_blocks, work.partial};
    ptx::mbarrier_arrive(info_full_barrier<Traits>(index_));
  }
  static_assert(Traits::kLateFactors || (!Rows::kFusedRouting && !Rows::kRequantizes));
  const Epilogue& epilogue_;
  uint32_t index_;
  int thread_;
  bool waits_later_ = false;
  TileRows rows_;
  int32_t assignment_ = 0, token_ = 0;
  RowScale row_scale_{};
  ExpertScales expert_scales_{};
};

// The role of warps 1 to 3 if TMA copies the rows.
template <class Traits, class Epilogue>
__device__ void produce_rows(const GemmArgs& args, const Epilogue& epilogue, const TmaRows& source,
                             const Schedule& schedule) {
  const int thread = static_cast<int>(threadIdx.x) - Traits::kConsumerThreads - 32;
  WorkTileIterator work_tiles(schedule, static_cast<int32_t>(blockIdx.x));
  uint32_t index = 0;
  for (WorkTile work; work_tiles.next(work); ++index)
    Description<Traits, Epilogue, TmaRows>(args, epilogue, source, work, index, thread)
        .complete(work);
}

// The same if they gather the rows. Rows: GatheredRows or FusedRoutingRows. A thread never waits
// for its copies: they arrive at the full barrier themselves.
template <class Traits, class Epilogue, class Rows>
__device__ void produce_rows(const GemmArgs& args, const Epilogue& epilogue, const Rows& source,
                             const Schedule& schedule) {
  constexpr int kColumns = Traits::kSlices * 8;  // of 16 bytes each, per row of 128 k
  constexpr int kRowsAtOnce = kProducerRowThreads / kColumns;
  // 24 rows are a multiple of the swizzle's period, 8 rows
  constexpr int kPeriod = 24 / kRowsAtOnce;
  constexpr int kBatch =
      Traits::kTileN <= 64 ? (Traits::kTileN + kRowsAtOnce - 1) / kRowsAtOnce : 3 * kPeriod;
  static_assert(kRowsAtOnce * kPeriod % 8 == 0);
  const int thread = static_cast<int>(threadIdx.x) - Traits::kConsumerThreads - 32;
  const int column = thread % kColumns, own_row = thread / kColumns;
  // The swizzle: in row i, 16 bytes `column % 8` of a slice are stored at column ^ i, so that eight
  // rows cover all banks.
  uint32_t offsets[kPeriod];
#pragma unroll
  for (int b = 0; b < kPeriod; ++b) {
    const int i = own_row + b * kRowsAtOnce;
    offsets[b] =
        static_cast<uint32_t>(column / 8 * Traits::kSliceBytes + i * 128 + ((column ^ i) & 7) * 16);
  }
  WorkTileIterator work_tiles(schedule, static_cast<int32_t>(blockIdx.x));
  PipelineState<Shared<Traits>::kStages> state;
  uint32_t index = 0;
  for (WorkTile work; work_tiles.next(work); ++index) {
    Description<Traits, Epilogue, Rows> description(args, epilogue, source, work, index, thread);
    const TileRows& rows = description.rows();
    ptx::named_barrier_sync<kProducerRowThreads>(1);  // all tokens are written
    const int32_t* const tokens = row_tokens<Traits>(index);
    const int padded_rows = Traits::kMBlocks > 2 ? (rows.count + 7) / 8 * 8 : rows.count;
    for (int32_t k_block = 0; k_block < work.k_blocks; ++k_block, state = state.next()) {
      const int32_t at = ((work.first_k_block + k_block) * kColumns + column) * 16;
      const bool valid = at < source.row_bytes;
      const std::byte* const from = source.x + (valid ? at : 0);
      ptx::mbarrier_wait(empty_barrier<Traits>(state.stage), state.parity ^ 1);
      const uint32_t stage = ptx::shared_address(stage_bytes<Traits>(state.stage));
      // after the first round, the zeros are in place
      const int written = k_block < Shared<Traits>::kStages ? padded_rows : rows.count;
#pragma unroll 1
      for (int first = 0; first < rows.count; first += kBatch * kRowsAtOnce) {
        int32_t token[kBatch];  // all are read before the copies: no read may pass a copy
#pragma unroll
        for (int b = 0; b < kBatch; ++b) token[b] = tokens[own_row + first + b * kRowsAtOnce];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int i = own_row + first + b * kRowsAtOnce;
          const bool has_row = i < rows.count;
          ptx::cp_async_16_if(
              stage + offsets[b % kPeriod] + (first + b / kPeriod * kPeriod * kRowsAtOnce) * 128,
              has_row ? from + int64_t{token[b]} * source.row_bytes : from, valid && has_row,
              i < written);
        }
      }
      ptx::cp_async_mbarrier_arrive_noinc(full_barrier<Traits>(state.stage));
      if (k_block == 0 && index == 0) ptx::mbarrier_arrive(first_rows_barrier<Traits>());
      if (k_block == description.completed_with(work)) description.complete(work);
    }
  }
}

}  // namespace nvfp4_moe::internal::sm90
