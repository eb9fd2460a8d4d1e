// The compile-time constants of a configuration's kernels, and the shared memory of a cta as one
// struct.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/fp4/epilogue.cuh"
#include "backend/cuda/gemm/pipeline.cuh"
#include "backend/cuda/ptx/address.cuh"
#include "backend/sm120/config.h"
#include "backend/sm120/weight_tile.h"

namespace nvfp4_moe::internal::sm120 {

namespace ptx = cuda::ptx;
using cuda::arrive_as_warp;
using cuda::kArrivalsPerWarp;
using cuda::PipelineState;
using cuda::turn_parity;
using cuda::fp4::DownEpilogue;
using cuda::fp4::GemmArgs;
using cuda::fp4::RowFactor;

// The constants of configuration kIndex.
template <size_t kIndex>
struct GemmTraits {
  static constexpr GemmConfig kConfig = kGemmConfigs[kIndex];
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kWarpsN = kConfig.warps_n, kWarpsM = kConsumerWarps / kWarpsN;
  // For one consumer warp: groups of 16 weight rows, and octets of rows of activations.
  static constexpr int kWarpGroups = cuda::kGroups / kWarpsM, kWarpOctets = kTileN / 8 / kWarpsN;
  static_assert(kWarpGroups * kWarpsM == cuda::kGroups && kWarpOctets * kWarpsN * 8 == kTileN);
  static constexpr int kEpilogueThreads = kConsumerWarps * 32;
  static constexpr int kThreads = kEpilogueThreads + 32;  // including the producer warp
  static constexpr int kLaneRows = (kTileN + 31) / 32;    // rows of a tile per producer lane
  // The first of this consumer warp's groups and octets.
  __device__ static int first_group() {
    return static_cast<int>(threadIdx.x / 32) % kWarpsM * kWarpGroups;
  }
  __device__ static int first_octet() {
    return static_cast<int>(threadIdx.x / 32) / kWarpsM * kWarpOctets;
  }
};

// One stage of the pipeline: a k-block of a tile's weight rows and rows of activations.
template <class Traits>
struct alignas(128) Stage {
  uint8_t weights[kBlockTiles][cuda::kTileBytes];
  uint8_t rows[Traits::kTileN][cuda::kFp4KBlockBytes];
};

// The shared memory of a cta with kStageCount stages. Barriers are mbarriers. Per-work-tile state
// is double-buffered, since the producer describes the next work tile while the consumers process
// one.
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
  alignas(8) uint64_t full[kStages];  // the stage is loaded
  uint64_t empty[kStages];            // all consumer warps have finished with it
  uint64_t rows_full[2];              // rows[i] is written
  uint64_t factors_full[2];           // factors[i] is written
  uint64_t work_empty[2];             // all consumer warps have finished with both
};

// As many stages as fit, up to kMaxStages; more would only make a cta start later.
inline constexpr int kMaxStages = 5;
template <class Traits>
using Shared =
    SharedOf<Traits, cuda::fitting_stages<SharedOf, Traits, kMaxSharedBytes, kMaxStages>()>;

// The layout that bulk copies, ldmatrix and mbarriers rely on. They use offsets, not types.
template <class Traits>
struct LayoutCheck {
  using S = Shared<Traits>;
  static_assert(sizeof(S) <= kMaxSharedBytes && S::kStages >= 2);
  static_assert(sizeof(Stage<Traits>) ==
                    kBlockTiles * cuda::kTileBytes + Traits::kTileN * cuda::kFp4KBlockBytes,
                "no padding");
  static_assert(offsetof(Stage<Traits>, rows) % 16 == 0 && cuda::kFp4KBlockBytes % 16 == 0,
                "bulk copies and ldmatrix");
  static_assert(offsetof(S, factors) % 16 == 0 && offsetof(S, full) % 8 == 0);
  static constexpr bool kPassed = true;
};

extern __shared__ __align__(128) uint8_t shared_bytes[];
template <class Traits>
__device__ Shared<Traits>& shared() {
  static_assert(LayoutCheck<Traits>::kPassed);
  return *reinterpret_cast<Shared<Traits>*>(shared_bytes);
}

}  // namespace nvfp4_moe::internal::sm120
