// The producer warp: loads weights and rows of activations into the stages by bulk copies, and
// writes the data that the consumers need about each work tile.
//
// For each stage one lane requests the weights, which are contiguous, and every lane requests a
// k-block of its rows. Weights of the first stages are requested before the preceding kernels have
// ended.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/tma.cuh"
#include "backend/sm120/shared.cuh"

namespace nvfp4_moe::internal::sm120 {

// A work tile's sources in memory, and this lane's rows.
template <class Traits, class Epilogue>
class TileSource {
 public:
  __device__ TileSource(const GemmArgs& args, const cuda::WorkTile& work,
                        const cuda::TileRows& rows, uint64_t policy)
      : args_(args), rows_(rows), first_k_block_(work.first_k_block), policy_(policy) {
    const int64_t m_tile_bytes = int64_t{args.k_tiles} * cuda::kTileBytes;
    weights_ = args.weights + rows.expert * args.expert_stride + work.tile.m_tile * m_tile_bytes;
  }
  // Finds the rows of x, after route.
  __device__ void find_rows() {
#pragma unroll
    for (int i = 0; i < Traits::kLaneRows; ++i) {
      const int row = lane() + i * 32;
      if (row >= rows_.count) continue;
      const auto global_row = static_cast<int32_t>(rows_.first + row);
      assignment_[i] = args_.assignment_of_row == nullptr
                           ? global_row
                           : __ldcg(args_.assignment_of_row + global_row);
      x_row_[i] = args_.assignment_of_row == nullptr ? global_row : args_.by_top_k(assignment_[i]);
    }
  }
  // Called by one lane: arrives for the stage, expecting the bytes of weights and rows.
  __device__ void request_weights(int32_t k_block, Stage<Traits>& stage, uint32_t full) const {
    const int32_t k_tile = (first_k_block_ + k_block) * kBlockTiles;
    const auto bytes =
        static_cast<uint32_t>(min(kBlockTiles, args_.k_tiles - k_tile) * cuda::kTileBytes);
    ptx::mbarrier_arrive_expect_tx(
        full, bytes + static_cast<uint32_t>(rows_.count * cuda::kFp4KBlockBytes));
    ptx::copy_bulk(ptx::shared_address(stage.weights), weights_ + k_tile * cuda::kTileBytes, bytes,
                   full, policy_);
  }
  __device__ void request_rows(int32_t k_block, Stage<Traits>& stage, uint32_t full,
                               uint64_t policy) const {
#pragma unroll
    for (int i = 0; i < Traits::kLaneRows; ++i) {
      const int row = lane() + i * 32;
      if (row < rows_.count)
        ptx::copy_bulk(ptx::shared_address(stage.rows[row]),
                       args_.x + x_row_[i] * args_.x_stride +
                           int64_t{first_k_block_ + k_block} * cuda::kFp4KBlockBytes,
                       cuda::kFp4KBlockBytes, full, policy);
    }
  }
  __device__ void put_factors(const Epilogue& epilogue, RowFactor* factors) const {
#pragma unroll
    for (int i = 0; i < Traits::kLaneRows; ++i) {
      const int row = lane() + i * 32;
      if (row < rows_.count)
        factors[row] = epilogue.factor(rows_.expert, x_row_[i], assignment_[i]);
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  const GemmArgs& args_;
  cuda::TileRows rows_;
  int32_t first_k_block_;
  const uint8_t* weights_;
  uint64_t policy_;
  int32_t x_row_[Traits::kLaneRows] = {}, assignment_[Traits::kLaneRows] = {};
};

// The role of the producer warp.
template <class Traits, class Epilogue>
__device__ void produce(const GemmArgs& args, const Epilogue& epilogue) {
  auto& shared = sm120::shared<Traits>();
  constexpr int kStages = Shared<Traits>::kStages;
  const bool leader = threadIdx.x % 32 == 0;
  // Wide tiles: other ctas read the same weights soon.
  const uint64_t soon = ptx::create_policy_evict_normal();
  const uint64_t weights_policy = Traits::kTileN > 32 ? soon : ptx::create_policy_evict_first();
  const auto address = [](const uint64_t& barrier) { return ptx::shared_address(&barrier); };
  PipelineState<kStages> state;
  cuda::WorkTileIterator work_tiles(shared.schedule, static_cast<int32_t>(blockIdx.x));
  uint32_t index = 0;
  for (cuda::WorkTile work; work_tiles.next(work); ++index) {
    const cuda::TileRows rows =
        cuda::rows_of_tile<Traits::kTileN>(args.row_tiles, work.tile.n_tile);
    TileSource<Traits, Epilogue> source(args, work, rows, weights_policy);
    ptx::mbarrier_wait(address(shared.work_empty[index % 2]), turn_parity(index) ^ 1);
    if (leader) {
      shared.rows[index % 2] = rows;
      ptx::mbarrier_arrive(address(shared.rows_full[index % 2]));
    }
    int32_t early = 0;  // stages whose weights are requested before the first wait
    if (index == 0) {
      if (args.after_route) early = min(work.k_blocks, kStages);
      if (leader)
        for (int32_t k_block = 0; k_block < early; ++k_block)
          source.request_weights(k_block, shared.stages[k_block], address(shared.full[k_block]));
      ptx::grid_dependency_wait();
    }
    source.find_rows();
#pragma unroll 1
    for (int32_t k_block = 0; k_block < work.k_blocks; ++k_block, state.advance()) {
      Stage<Traits>& stage = shared.stages[state.stage];
      const uint32_t full = address(shared.full[state.stage]);
      if (k_block >= early) {
        ptx::mbarrier_wait(address(shared.empty[state.stage]), state.parity ^ 1);
        if (leader) source.request_weights(k_block, stage, full);
      }
      __syncwarp();  // the bytes must be expected before any of them arrive
      source.request_rows(k_block, stage, full, soon);
      if (k_block != 0) continue;
      source.put_factors(epilogue, shared.factors[index % 2]);
      __syncwarp();
      if (leader) ptx::mbarrier_arrive(address(shared.factors_full[index % 2]));
    }
  }
  if (index == 0) ptx::grid_dependency_wait();  // every cta waits
}

}  // namespace nvfp4_moe::internal::sm120
