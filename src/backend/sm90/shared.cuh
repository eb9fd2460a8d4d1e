// The compile-time constants of a configuration's kernels, and the shared memory of a cta as one
// struct.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "backend/cuda/gemm/pipeline.cuh"
#include "backend/cuda/gemm/row_tiles.cuh"
#include "backend/cuda/gemm/scheduler.h"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/ptx/address.cuh"
#include "backend/sm90/config.h"
#include "backend/sm90/dequantize.cuh"
#include "backend/sm90/gemm_params.cuh"

namespace nvfp4_moe::internal::sm90 {

namespace ptx = cuda::ptx;

inline constexpr int kProducerRowThreads = 96;  // warps 1 to 3 of the producer

using cuda::kArrivalsPerWarp;
using cuda::PipelineState;
using cuda::TileRows;
// Routing results of a cta that routes itself.
struct alignas(16) FusedRouting {
  cuda::RowTile row_tiles[cuda::kSmallBatch];
  int32_t assignment_of_row[cuda::kSmallBatch];
};
// A work tile as the producer describes it to the consumers.
struct WorkTileInfo {
  TileRows rows;
  int32_t weight_row;  // the first one
  int32_t k_blocks, partial;
};

// The constants of configuration kIndex. kGathers: its rows are gathered by cp.async, even if its
// own kernels copy them by TMA.
template <size_t kIndex, bool kGathers = false>
struct GemmTraits {
  static constexpr GemmConfig kConfig = kGemmConfigs[kIndex];
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kMBlocks = kConfig.tile_m / cuda::kTileRows;
  static constexpr bool kWide = kConfig.wide_tiles(), kTmaRows = kConfig.tma_rows && !kGathers;
  static constexpr bool kFp8 = kConfig.fp8, kAhead = kConfig.ahead;
  using Products = std::conditional_t<kFp8, Fp8Products, Bf16Products>;
  static constexpr int kConsumerWarpgroups = kConfig.consumer_warpgroups,
                       kConsumerThreads = kConsumerWarpgroups * 128;
  static constexpr int kThreads = kConsumerThreads + 128;  // including the producer warpgroup
  // wgmmas of 64 weight rows per consumer warpgroup.
  static constexpr int kM64 = kConfig.tile_m / 64 / kConsumerWarpgroups;
  static_assert(kM64 * kConsumerWarpgroups * 64 == kConfig.tile_m);
  // Registers per thread. In total at most the registers that a cta starts with: 65536 divided
  // equally among its threads, rounded down to a multiple of 8.
  static constexpr int kConsumerRegisters = kConsumerWarpgroups == 4 ? 104 : 216;
  static constexpr int kProducerRegisters = kConsumerWarpgroups == 4 ? 64 : 72;
  static_assert(kConsumerThreads * kConsumerRegisters + 128 * kProducerRegisters <=
                kThreads * (65536 / kThreads / 8 * 8));
  static constexpr int kStepsPerGroup = kConfig.steps_per_group;
  static constexpr int64_t kPartialFloat4s = kConfig.partial_bytes() / 16;
  static_assert(Products::kSteps % kStepsPerGroup == 0);
  // A row's 128 k are stored in slices of 128 bytes (the period of the swizzle) of four steps each.
  static constexpr int kSlices = kFp8 ? 1 : 2, kSliceBytes = kTileN * 128,
                       kStepsOfSlice = 4;  // kSliceBytes: for all rows
  static_assert(kSlices * kStepsOfSlice == 2 * Products::kSteps);
  // If latency matters, a work tile is multiplied before its row factors are ready.
  static constexpr bool kLateFactors = kTileN <= 16;
  static constexpr bool kMayFuseRouting = kConfig.fused_routing(),
                        kMayFuseRequantize = kConfig.fused_requantize();
  // per warpgroup, to transpose outputs
  static constexpr int kStagingBytes = 16 * 1024 / kConsumerWarpgroups;
};

// One stage of the pipeline: a k-block of a tile's rows and weight rows.
template <class Traits>
struct alignas(1024) Stage {  // the period of the swizzle
  uint8_t rows[Traits::kSlices]
              [Traits::kSliceBytes];  // (slice of the k-block, row) x 128 bytes, swizzled
  uint8_t weights[Traits::kMBlocks][cuda::kTileBytes];  // packed tiles
};
template <class Traits>
struct Staging {
  alignas(16) uint8_t bytes[Traits::kConsumerWarpgroups][Traits::kStagingBytes];
};

// The table of Fp8Products: E4M3 magnitudes by scale index. There is one copy for each lane of a
// half-warp, since shared memory serves a half-warp at a time. If sixteen lanes read one table at
// random addresses, it takes three times as long, and shared memory is already busy with the rows
// that wgmma reads.
struct Magnitudes {
  static constexpr int kCopies = 16;
  alignas(128) uint2 of[kFp8ScaleIndices][kCopies];
};

// Buffers of row threads that requantize: each thread's own bf16 elements of the next k-blocks, in
// alternating slots; and the largest magnitudes of a work tile's rows, as found by each thread.
template <class Traits>
struct RequantizeBuffers {
  static constexpr int kSlots = 2, kPasses = 2;
  uint4 elements[kSlots][kPasses][2][kProducerRowThreads];  // a block of 16 per thread, by halves
  alignas(16) uint32_t magnitudes[2][Traits::kTileN][kProducerRowThreads];
};

// The shared memory of a cta with kStageCount stages. Members that a configuration does not need
// take no space. Barriers are mbarriers, which instructions use only by address. Those in pairs
// alternate between work tiles, since the producer describes the next one while the consumers
// process one.
template <class Traits, int kStageCount>
struct SharedOf {
  static constexpr int kStages = kStageCount;
  struct NoStaging {};
  struct NoRouting {};
  struct NoMagnitudes {};
  struct NoRequantize {};
  struct Work {
    Schedule schedule;
    // tiles that this cta reduces, starting from its last split tile; count 0: it was not the last
    // to arrive
    TileSplits to_reduce[2];
    uint8_t unused[128 - sizeof(Schedule) - 2 * sizeof(TileSplits)];
  };

  Stage<Traits> stages[kStages];
  [[no_unique_address]] std::conditional_t<Traits::kWide, Staging<Traits>, NoStaging> staging;
  [[no_unique_address]] std::conditional_t<Traits::kFp8, Magnitudes, NoMagnitudes> magnitudes;
  [[no_unique_address]] std::conditional_t<Traits::kMayFuseRequantize, RequantizeBuffers<Traits>,
                                           NoRequantize>
      requantize;
  RowFactor factors[2][Traits::kTileN];
  int32_t tokens[2][Traits::kTileN];  // for gathered rows
  WorkTileInfo work_tiles[2];
  Work work;
  [[no_unique_address]] std::conditional_t<Traits::kMayFuseRouting, FusedRouting, NoRouting>
      routing;
  uint64_t full[kStages];         // the stage is loaded
  uint64_t empty[kStages];        // all consumer warps have finished with it
  uint64_t info_full[2];          // work_tiles[i] is written; without kLateFactors also factors[i]
  uint64_t info_empty[2];         // all consumer warps have finished with them
  uint64_t factors_full[2];       // under kLateFactors: factors[i] is written
  uint64_t first_rows_requested;  // copies of the first rows have been issued
};

// As many stages as fit, up to kMaxStages; more would only make a cta start later.
inline constexpr int kMaxStages = 8;
template <class Traits>
using Shared =
    SharedOf<Traits, cuda::fitting_stages<SharedOf, Traits, kMaxSharedBytes, kMaxStages>()>;

// The layout that copies, stmatrix, wgmma and mbarriers rely on. They use offsets, not types.
template <class Traits>
struct LayoutCheck {
  using S = Shared<Traits>;
  static_assert(sizeof(S) <= kMaxSharedBytes && S::kStages >= 3);
  static_assert(sizeof(Stage<Traits>) ==
                    Traits::kSlices * Traits::kSliceBytes + Traits::kMBlocks * cuda::kTileBytes,
                "no padding");
  static_assert(sizeof(Stage<Traits>) % 1024 == 0,
                "every stage begins with a period of the swizzle");
  static_assert(offsetof(Stage<Traits>, weights) % 1024 == 0,
                "rows are whole periods; bulk copies need 16");
  static_assert(offsetof(S, stages) == 0, "shared memory begins at a multiple of 1024");
  static_assert(offsetof(S, factors) ==
                S::kStages * sizeof(Stage<Traits>) +
                    (Traits::kWide ? sizeof(Staging<Traits>) : size_t{0}) +
                    (Traits::kFp8 ? sizeof(Magnitudes) : size_t{0}) +
                    (Traits::kMayFuseRequantize ? sizeof(RequantizeBuffers<Traits>) : size_t{0}));
  static_assert(offsetof(S, factors) % 16 == 0 && offsetof(S, work) % 16 == 0);
  static_assert(offsetof(S, full) ==
                offsetof(S, work) + sizeof(typename S::Work) +
                    (Traits::kMayFuseRouting ? sizeof(FusedRouting) : size_t{0}));
  static_assert(offsetof(S, full) % 8 == 0, "mbarriers");
  static constexpr bool kPassed = true;
};

extern __shared__ __align__(1024) uint8_t shared_bytes[];
template <class Traits>
__device__ Shared<Traits>& shared() {
  static_assert(LayoutCheck<Traits>::kPassed);
  return *reinterpret_cast<Shared<Traits>*>(shared_bytes);
}

// Addresses in the shared window by offset: taking a member's address through an object and an
// array costs the mainloop instructions.
template <class Traits>
__device__ uint8_t* stage_bytes(int stage) {
  return shared_bytes + stage * static_cast<int>(sizeof(Stage<Traits>));
}
template <class Traits>
inline constexpr int kWeightsOffset = static_cast<int>(offsetof(Stage<Traits>, weights));
template <class Traits>
__device__ uint8_t* staging_bytes(int warpgroup) {
  return shared_bytes + static_cast<int>(offsetof(Shared<Traits>, staging)) +
         warpgroup * Traits::kStagingBytes;
}
template <class Traits>
__device__ WorkTileInfo& work_tile_info(uint32_t index) {
  return shared<Traits>().work_tiles[index % 2];
}
// The entry of index 0 in this lane's copy; entries are Magnitudes::kCopies apart. null if the
// products need no table.
template <class Traits>
__device__ uint2* magnitudes(int copy) {
  if constexpr (Traits::kFp8)
    return reinterpret_cast<uint2*>(shared_bytes +
                                    static_cast<int>(offsetof(Shared<Traits>, magnitudes))) +
           copy;
  return nullptr;
}
// (kTileN) factors of a work tile.
template <class Traits>
__device__ RowFactor* row_factors(uint32_t index) {
  return shared<Traits>().factors[0] + index % 2 * Traits::kTileN;
}
template <class Traits>
__device__ int32_t* row_tokens(uint32_t index) {
  return shared<Traits>().tokens[0] + index % 2 * Traits::kTileN;
}
#define NVFP4_MOE_BARRIER(name, member, Index, offset)                      \
  template <class Traits>                                                   \
  __device__ uint32_t name(Index index) {                                   \
    return ptx::shared_address(shared_bytes) +                              \
           static_cast<int>(offsetof(Shared<Traits>, member)) + (offset)*8; \
  }
NVFP4_MOE_BARRIER(full_barrier, full, int, index)
NVFP4_MOE_BARRIER(empty_barrier, empty, int, index)
NVFP4_MOE_BARRIER(info_full_barrier, info_full, uint32_t, index % 2)
NVFP4_MOE_BARRIER(info_empty_barrier, info_empty, uint32_t, index % 2)
NVFP4_MOE_BARRIER(factors_full_barrier, factors_full, uint32_t, index % 2)
#undef NVFP4_MOE_BARRIER
template <class Traits>
__device__ uint32_t first_rows_barrier() {
  return ptx::shared_address(shared_bytes) +
         static_cast<int>(offsetof(Shared<Traits>, first_rows_requested));
}

}  // namespace nvfp4_moe::internal::sm90
