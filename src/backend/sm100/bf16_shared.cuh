// The counterpart of shared.cuh for the GEMMs for bf16 activations: constants, shared memory and
// tensor memory.
//
// A stage is 128 k: a packed tile of weights, the same tile in bf16, and the tile's rows of
// activations. Both operands are stored K-major in the 128-byte swizzle, in halves of 64 k.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "backend/sm100/shared.cuh"

namespace nvfp4_moe::internal::sm100 {

inline constexpr int kFirstDequantizeWarp = kFirstGatherWarp + kGatherWarps, kDequantizeWarps = 4;
inline constexpr int kBf16StepBytes = 32;  // per row: the 16 k of one product
inline constexpr int kHalfRowBytes = 128;  // 64 k of a row in bf16
inline constexpr int kHalfSteps = kHalfRowBytes / kBf16StepBytes;
// Offset, within 64 k of bf16 rows, of the 16 bytes with k 8 c to 8 c + 7.
NVFP4_MOE_HOST_DEVICE constexpr int bf16_offset(int row, int c) {
  return row * kHalfRowBytes + (c ^ (row & 7)) * 16;
}

template <size_t kIndex>
struct Bf16Traits {
  static constexpr GemmConfig kConfig = kBf16GemmConfigs[kIndex];
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kEpilogueThreads = kEpilogueWarps * 32, kGatherThreads = kGatherWarps * 32;
  static constexpr int kDequantizeThreads = kDequantizeWarps * 32;
  static constexpr int kThreads = (kFirstDequantizeWarp + kDequantizeWarps) * 32;
  static constexpr int kWarpGroups = cuda::kGroups / kEpilogueWarps, kWarpOctets = kTileN / 8;
  __device__ static int first_group() { return static_cast<int>(threadIdx.x / 32) * kWarpGroups; }
  __device__ static int first_octet() { return 0; }
  static constexpr int kStageTiles = 1;
  static constexpr int kRowVecs = cuda::kTileK * 2 / 16;
  static constexpr int kPassRows = kGatherThreads / kRowVecs, kPasses = kTileN / kPassRows;
  static constexpr int kAccumulatorColumns = std::max(kTileN, 32);
  static constexpr int kColumns =
      static_cast<int>(std::bit_ceil(static_cast<unsigned>(2 * kAccumulatorColumns)));
  // A product with 128 weight rows takes rows of activations in steps of 16.
  static_assert(kTileN % 16 == 0 && kTileN <= 256 && kPasses * kPassRows == kTileN);
  static_assert(kDequantizeThreads == cuda::kTileRows, "one thread a weight row");
};

template <class Traits>
struct alignas(1024) Bf16Stage {
  uint8_t dequantized[cuda::kHalves][cuda::kTileRows * kHalfRowBytes];
  uint8_t rows[cuda::kHalves][Traits::kTileN * kHalfRowBytes];
  uint8_t weights[1][cuda::kTileBytes];
};

template <class Traits, int kStageCount>
struct Bf16SharedOf {
  static constexpr int kStages = kStageCount;
  Bf16Stage<Traits> stages[kStages];
  RowFactor factors[2][Traits::kTileN];
  cuda::TileRows rows[2];
  cuda::Schedule schedule;
  cuda::TileSplits to_reduce[2];
  uint32_t tensor_memory;
  alignas(8) uint64_t full[kStages];  // packed weights and rows are loaded
  uint64_t dequantized[kStages];      // and the weights in bf16 are written
  uint64_t empty[kStages];            // all products of the stage have finished
  uint64_t rows_full[2];
  uint64_t factors_full[2];
  uint64_t accumulators_full[2];
  uint64_t work_empty[2];
};
template <class Traits>
using Bf16Shared =
    Bf16SharedOf<Traits, cuda::fitting_stages<Bf16SharedOf, Traits, kMaxSharedBytes, kMaxStages>()>;

template <class Traits>
__device__ Bf16Shared<Traits>& bf16_shared() {
  using S = Bf16Shared<Traits>;
  static_assert(sizeof(S) <= kMaxSharedBytes && S::kStages >= 3);
  static_assert(offsetof(Bf16Stage<Traits>, rows) % 1024 == 0 &&
                Traits::kTileN * kHalfRowBytes % 1024 == 0);
  static_assert(offsetof(Bf16Stage<Traits>, weights) % 16 == 0 && offsetof(S, full) % 8 == 0);
  return *reinterpret_cast<S*>(shared_bytes);
}

}  // namespace nvfp4_moe::internal::sm100
