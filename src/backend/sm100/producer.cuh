// The producers: one warp loads packed weights, four gather rows of activations and write the row
// data that the epilogue needs.
//
// Packed weights of a k-block are contiguous in the tensor cores' order, so one bulk copy loads
// them. Rows are scattered like their tokens, and their codes and scales go to separate parts of
// the stage (row_tile.h): threads copy 16 or 4 bytes each, eight threads per row. These copies
// write through the generic proxy; the thread that issues the products fences.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/cp_async.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/ptx/tma.cuh"
#include "backend/sm100/shared.cuh"

namespace nvfp4_moe::internal::sm100 {

// The role of the warp that loads weights, and publishes the rows of each work tile. It does not
// wait for preceding kernels: weights already exist, and a launch with after_route guarantees the
// rest.
template <class Traits, class Shared>
__device__ void load_weights(Shared& shared, const GemmArgs& args) {
  const bool leader = threadIdx.x % 32 == 0;
  // Wide tiles: other ctas read the same weights soon.
  const uint64_t policy =
      Traits::kTileN > 64 ? ptx::create_policy_evict_normal() : ptx::create_policy_evict_first();
  const int64_t m_tile_bytes = int64_t{args.k_tiles} * cuda::kTileBytes;
  PipelineState<Shared::kStages> state;
  cuda::WorkTileIterator work_tiles(shared.schedule, static_cast<int32_t>(blockIdx.x));
  uint32_t index = 0;
  for (cuda::WorkTile work; work_tiles.next(work); ++index) {
    const cuda::TileRows rows =
        cuda::rows_of_tile<Traits::kTileN>(args.row_tiles, work.tile.n_tile);
    ptx::mbarrier_wait(ptx::shared_address(&shared.work_empty[index % 2]), turn_parity(index) ^ 1);
    if (leader) {
      shared.rows[index % 2] = rows;
      ptx::mbarrier_arrive(ptx::shared_address(&shared.rows_full[index % 2]));
    }
    const uint8_t* const weights =
        args.weights + rows.expert * args.expert_stride + work.tile.m_tile * m_tile_bytes;
#pragma unroll 1
    for (int32_t k_block = 0; k_block < work.k_blocks; ++k_block, state.advance()) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[state.stage]), state.parity ^ 1);
      if (!leader) continue;
      const int32_t k_tile = (work.first_k_block + k_block) * Traits::kStageTiles;
      const auto bytes =
          static_cast<uint32_t>(min(Traits::kStageTiles, args.k_tiles - k_tile) * cuda::kTileBytes);
      const uint32_t full = ptx::shared_address(&shared.full[state.stage]);
      ptx::mbarrier_arrive_expect_tx(full, bytes);
      ptx::copy_bulk(ptx::shared_address(shared.stages[state.stage].weights),
                     weights + k_tile * cuda::kTileBytes, bytes, full, policy);
    }
    __syncwarp();
  }
}

// The rows of x of which a gathering thread copies 16 bytes, for a work tile.
template <class Traits>
class TileSources {
 public:
  __device__ TileSources(const GemmArgs& args, const cuda::TileRows& rows)
      : args_(args), rows_(rows) {
#pragma unroll
    for (int pass = 0; pass < Traits::kPasses; ++pass) {
      if (row(pass) >= rows.count) continue;
      x_row_[pass] =
          args.assignment_of_row == nullptr ? assignment(pass) : args.by_top_k(assignment(pass));
    }
  }
  template <class Epilogue>
  __device__ void put_factors(const Epilogue& epilogue, RowFactor* factors) const {
#pragma unroll
    for (int pass = 0; pass < Traits::kPasses; ++pass)
      if (vec() == 0 && row(pass) < rows_.count)
        factors[row(pass)] = epilogue.factor(rows_.expert, x_row_[pass], assignment(pass));
  }

 protected:
  __device__ static int thread() { return static_cast<int>(threadIdx.x) - kFirstGatherWarp * 32; }
  __device__ static int row(int pass) {
    return pass * Traits::kPassRows + thread() / Traits::kRowVecs;
  }
  __device__ static int vec() { return thread() % Traits::kRowVecs; }
  const GemmArgs& args_;
  cuda::TileRows rows_;
  int32_t x_row_[Traits::kPasses] = {};

 private:
  // Read from L2 each time: it is needed only twice per work tile, and registers are scarce.
  __device__ int32_t assignment(int pass) const {
    const auto global_row = static_cast<int32_t>(rows_.first + row(pass));
    return args_.assignment_of_row == nullptr ? global_row
                                              : __ldcg(args_.assignment_of_row + global_row);
  }
};

// Rows as FP4 operand: 16 bytes of codes per row, and for some threads a word of scales.
template <class Traits>
class GatheredRows : public TileSources<Traits> {
  using Base = TileSources<Traits>;
  using Base::args_, Base::rows_, Base::x_row_, Base::row, Base::vec;

 public:
  using Base::Base;
  __device__ void request(int32_t k_block, Stage<Traits>& stage) const {
    const uint32_t codes = ptx::shared_address(stage.row_codes),
                   scales = ptx::shared_address(stage.row_scales);
#pragma unroll
    for (int pass = 0; pass < Traits::kPasses; ++pass) {
      if (row(pass) >= rows_.count) continue;
      const std::byte* const from =
          args_.x + x_row_[pass] * args_.x_stride + int64_t{k_block} * cuda::kFp4KBlockBytes;
      ptx::cp_async_16(codes + row_codes_offset(row(pass), vec()), from + vec() * 16);
      if (vec() < kRowWords)
        ptx::cp_async_4(scales + row_scales_offset(row(pass), vec(), Traits::kAtoms),
                        from + cuda::kFp4KBlockScales + vec() * 4);
    }
  }
};

// The role of the gathering warps. Rows: GatheredRows, or others with the same functions.
template <class Traits, class Rows, class Shared, class Epilogue>
__device__ void gather_rows(Shared& shared, const GemmArgs& args, const Epilogue& epilogue) {
  ptx::grid_dependency_wait();  // the preceding kernel writes the rows of activations
  PipelineState<Shared::kStages> state;
  cuda::WorkTileIterator work_tiles(shared.schedule, static_cast<int32_t>(blockIdx.x));
  uint32_t index = 0;
  for (cuda::WorkTile work; work_tiles.next(work); ++index) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.rows_full[index % 2]), turn_parity(index));
    const Rows rows(args, shared.rows[index % 2]);
#pragma unroll 1
    for (int32_t k_block = 0; k_block < work.k_blocks; ++k_block, state.advance()) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[state.stage]), state.parity ^ 1);
      rows.request(work.first_k_block + k_block, shared.stages[state.stage]);
      ptx::cp_async_mbarrier_arrive_noinc(ptx::shared_address(&shared.full[state.stage]));
      if (k_block != 0) continue;
      rows.put_factors(epilogue, shared.factors[index % 2]);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.factors_full[index % 2]));
    }
  }
}

}  // namespace nvfp4_moe::internal::sm100
