// Compile-time constants of a kernel's configuration, and a cta's shared memory and tensor memory.
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

// The warps of a cta by their roles. Warp w of the epilogue reaches the lanes 32 w .. 32 w + 31 of
// tensor memory.
inline constexpr int kEpilogueWarps = 4, kWeightsWarp = 4, kMmaWarp = 5, kFirstGatherWarp = 6,
                     kGatherWarps = 4;

// The constants of configuration kIndex of the FP4 GEMMs.
template <size_t kIndex>
struct GemmTraits {
  static constexpr GemmConfig kConfig = kGemmConfigs[kIndex];
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kEpilogueThreads = kEpilogueWarps * 32, kGatherThreads = kGatherWarps * 32;
  static constexpr int kThreads = (kFirstGatherWarp + kGatherWarps) * 32;
  // Of one warp of the epilogue: groups of 16 weight rows, and octets of rows of activations.
  static constexpr int kWarpGroups = cuda::kGroups / kEpilogueWarps, kWarpOctets = kTileN / 8;
  __device__ static int first_group() { return static_cast<int>(threadIdx.x / 32) * kWarpGroups; }
  __device__ static int first_octet() { return 0; }
  static constexpr int kStageTiles = kBlockTiles;  // of packed weights
  // Gathering: a thread for each 16 bytes of codes of a row.
  static constexpr int kRowVecs = sm100::kRowVecs;
  static constexpr int kPassRows = kGatherThreads / kRowVecs,
                       kPasses = (kTileN + kPassRows - 1) / kPassRows;

  // Columns of tensor memory: two tiles' accumulators by turns, then the scales of a k-block's
  // weights and rows.
  static constexpr int kAtoms = atoms_of(kTileN), kAtomColumns = kAtomRows / 32;
  static constexpr int kAccumulatorColumns = std::max(kTileN, 32);
  static constexpr int kWeightScales = 2 * kAccumulatorColumns;
  static constexpr int kRowScales = kWeightScales + kBlockSteps * kAtomColumns;
  static constexpr int kUsedColumns = kRowScales + kBlockSteps * kAtoms * kAtomColumns;
  static constexpr int kColumns =
      static_cast<int>(std::bit_ceil(static_cast<unsigned>(kUsedColumns)));
  static_assert(kTileN % 8 == 0 && kTileN <= 256 && kColumns <= 512);
};

// One stage of the pipeline: a k-block of a tile's weight rows and of its rows of activations, as
// weight_tile.h and row_tile.h have them.
template <class Traits>
struct alignas(1024) Stage {  // the period of the swizzle
  uint8_t weights[kBlockTiles][cuda::kTileBytes];
  uint8_t row_codes[Traits::kTileN][kRowBytes];
  uint8_t row_scales[kBlockSteps][Traits::kAtoms * kAtomBytes];
};

// The shared memory of a cta with that many stages. Barriers are mbarriers; what belongs to work
// tiles stands twice, for them by turns, and so do accumulators in tensor memory: the next tile is
// multiplied while this one is stored.
template <class Traits, int kStageCount>
struct SharedOf {
  static constexpr int kStages = kStageCount;
  Stage<Traits> stages[kStages];
  RowFactor factors[2][Traits::kTileN];
  cuda::TileRows rows[2];
  cuda::Schedule schedule;
  cuda::TileSplits to_reduce[2];  // that the cta reduces, from its last split tile on; count 0: not
                                  // the last to arrive
  uint32_t tensor_memory;         // the address of the first column
  alignas(8) uint64_t full[kStages];  // the stage is there
  uint64_t empty[kStages];            // all products of it are done
  uint64_t rows_full[2];              // rows[i] is there
  uint64_t factors_full[2];           // factors[i] is there
  uint64_t accumulators_full[2];      // the tile's products are done
  uint64_t
      work_empty[2];  // the epilogue is done with all of them, the multiplying thread with rows[i]
};

// As many stages as fit; more than kMaxStages would only lengthen a cta's start.
inline constexpr int kMaxStages = 8;
template <class Traits>
using Shared =
    SharedOf<Traits, cuda::fitting_stages<SharedOf, Traits, kMaxSharedBytes, kMaxStages>()>;

// The contract with copies, descriptors and mbarriers, which trust offsets rather than types.
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
