// The compile-time constants of a configuration's kernels, and a cta's shared memory and tensor
// memory.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/fp4/epilogue.cuh"
#include "backend/cuda/gemm/pipeline.cuh"
#include "backend/cuda/ptx/address.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/sm100/config.h"
#include "backend/sm100/row_tile.h"

namespace nvfp4_moe::internal::sm100 {

namespace ptx = cuda::ptx;
using cuda::arrive_as_warp;
using cuda::kArrivalsPerWarp;
using cuda::PipelineState;
using cuda::turn_parity;
using cuda::fp4::DownEpilogue;
using cuda::fp4::GemmArgs;
using cuda::fp4::RowFactor;

// The warps of a cta by role. Warp w of the epilogue can access lanes 32 w .. 32 w + 31 of tensor
// memory.
inline constexpr int kEpilogueWarps = 4, kWeightsWarp = 4, kMmaWarp = 5, kFirstGatherWarp = 6,
                     kGatherWarps = 4;

// The constants of configuration kIndex of the FP4 GEMMs.
template <size_t kIndex>
struct GemmTraits {
  static constexpr GemmConfig kConfig = kGemmConfigs[kIndex];
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kEpilogueThreads = kEpilogueWarps * 32, kGatherThreads = kGatherWarps * 32;
  static constexpr int kThreads = (kFirstGatherWarp + kGatherWarps) * 32;
  // For one warp of the epilogue: groups of 16 weight rows, and octets of rows of activations.
  static constexpr int kWarpGroups = cuda::kGroups / kEpilogueWarps, kWarpOctets = kTileN / 8;
  __device__ static int first_group() { return static_cast<int>(threadIdx.x / 32) * kWarpGroups; }
  __device__ static int first_octet() { return 0; }
  static constexpr int kStageTiles = kBlockTiles;  // of packed weights
  // Gathering: one thread per 16 bytes of codes of a row.
  static constexpr int kRowVecs = sm100::kRowVecs;
  static constexpr int kPassRows = kGatherThreads / kRowVecs,
                       kPasses = (kTileN + kPassRows - 1) / kPassRows;

  // Columns of tensor memory: double-buffered accumulators of a tile, then the scales of a
  // k-block's weights and rows.
  static constexpr int kAtoms = atoms_of(kTileN), kAtomColumns = kAtomRows / 32;
  static constexpr int kAccumulatorColumns = std::max(kTileN, 32);
  static constexpr int kWeightScales = 2 * kAccumulatorColumns;
  static constexpr int kRowScales = kWeightScales + kBlockSteps * kAtomColumns;
  static constexpr int kUsedColumns = kRowScales + kBlockSteps * kAtoms * kAtomColumns;
  static constexpr int kColumns =
      static_cast<int>(std::bit_ceil(static_cast<unsigned>(kUsedColumns)));
  static_assert(kTileN % 8 == 0 && kTileN <= 256 && kColumns <= 512);
};

// One stage of the pipeline: a k-block of a tile's weight rows and rows of activations, in the
// layouts of weight_tile.h and row_tile.h.
template <class Traits>
struct alignas(1024) Stage {  // the period of the swizzle
  uint8_t weights[kBlockTiles][cuda::kTileBytes];
  uint8_t row_codes[Traits::kTileN][kRowBytes];
  uint8_t row_scales[kBlockSteps][Traits::kAtoms * kAtomBytes];
};

// The shared memory of a cta with kStageCount stages. Barriers are mbarriers. Per-work-tile state
// is double-buffered, and so are accumulators in tensor memory: the next tile is multiplied while
// this one is stored.
template <class Traits, int kStageCount>
struct SharedOf {
  static constexpr int kStages = kStageCount;
  Stage<Traits> stages[kStages];
  RowFactor factors[2][Traits::kTileN];
  cuda::TileRows rows[2];
  cuda::Schedule schedule;
  // tiles that this cta reduces, starting from its last split tile; count 0: it was not the last to
  // arrive
  cuda::TileSplits to_reduce[2];
  uint32_t tensor_memory;             // the address of the first column
  alignas(8) uint64_t full[kStages];  // the stage is loaded
  uint64_t empty[kStages];            // all its products have finished
  uint64_t rows_full[2];              // rows[i] is written
  uint64_t factors_full[2];           // factors[i] is written
  uint64_t accumulators_full[2];      // the tile's products have finished
  // the epilogue has finished with all of them, and the multiplying thread with rows[i]
  uint64_t work_empty[2];
};

// As many stages as fit, up to kMaxStages; more would only make a cta start later.
inline constexpr int kMaxStages = 8;
template <class Traits>
using Shared =
    SharedOf<Traits, cuda::fitting_stages<SharedOf, Traits, kMaxSharedBytes, kMaxStages>()>;

// The layout that copies, descriptors and mbarriers rely on. They use offsets, not types.
template <class Traits>
struct LayoutCheck {
  using S = Shared<Traits>;
  static_assert(sizeof(S) <= kMaxSharedBytes && S::kStages >= 3);
  static_assert(offsetof(S, stages) == 0 && cuda::kTileBytes % 512 == 0,
                "tiles of weights begin with their swizzle");
  static_assert(offsetof(Stage<Traits>, row_codes) % 1024 == 0, "rows begin with their swizzle");
  static_assert(offsetof(Stage<Traits>, row_scales) % 16 == 0 && offsetof(S, factors) % 16 == 0);
  static_assert(offsetof(S, full) % 8 == 0);
  static constexpr bool kPassed = true;
};

extern __shared__ __align__(1024) uint8_t shared_bytes[];
template <class Traits>
__device__ Shared<Traits>& shared() {
  static_assert(LayoutCheck<Traits>::kPassed);
  return *reinterpret_cast<Shared<Traits>*>(shared_bytes);
}

}  // namespace nvfp4_moe::internal::sm100
