// Compile-time constants of a kernel's configuration, and the shared memory of its ctas as one
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
  // Of one consumer warp: groups of 16 weight rows, and octets of rows of activations.
  static constexpr int kWarpGroups = cuda::kGroups / kWarpsM, kWarpOctets = kTileN / 8 / kWarpsN;
  static_assert(kWarpGroups * kWarpsM == cuda::kGroups && kWarpOctets * kWarpsN * 8 == kTileN);
  static constexpr int kEpilogueThreads = kConsumerWarps * 32;
  static constexpr int kThreads = kEpilogueThreads + 32;  // and the producer warp
  static constexpr int kLaneRows = (kTileN + 31) / 32;  // rows of a tile that one producer lane has
  // The first of this consumer warp's groups and octets.
  __device__ static int first_group() {
    return static_cast<int>(threadIdx.x / 32) % kWarpsM * kWarpGroups;
  }
  __device__ static int first_octet() {
    return static_cast<int>(threadIdx.x / 32) / kWarpsM * kWarpOctets;
  }
};

// One stage of the pipeline: a k-block of a tile's weight rows and of its rows of activations.
template <class Traits>
struct alignas(128) Stage {
  uint8_t weights[kBlockTiles][cuda::kTileBytes];
  uint8_t rows[Traits::kTileN][cuda::kFp4KBlockBytes];
};

// The shared memory of a cta with that many stages. Barriers are mbarriers; what belongs to work
// tiles stands twice, for them by turns, since the producer describes the next one while the
// consumers are at one.
template <class Traits, int kStageCount>
struct SharedOf {
  static constexpr int kStages = kStageCount;
  Stage<Traits> stages[kStages];
  RowFactor factors[2][Traits::kTileN];
  cuda::TileRows rows[2];
  cuda::Schedule schedule;
  cuda::TileSplits to_reduce[2];  // that the cta reduces, from its last split tile on; count 0: not
                                  // the last to arrive
  alignas(8) uint64_t full[kStages];  // the stage is there
  uint64_t empty[kStages];            // all consumer warps are done with it
  uint64_t rows_full[2];              // rows[i] is there
  uint64_t factors_full[2];           // factors[i] is there
  uint64_t work_empty[2];             // all consumer warps are done with both
};

// As many stages as fit; more than kMaxStages would only lengthen a cta's start.
inline constexpr int kMaxStages = 5;
template <class Traits>
using Shared =
    SharedOf<Traits, cuda::fitting_stages<SharedOf, Traits, kMaxSharedBytes, kMaxStages>()>;

// The contract with bulk copies, ldmatrix and mbarriers, which trust offsets rather than types.
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
