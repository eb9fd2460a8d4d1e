// Shared by kernels that pack and unpack tiles in any order of codes: rows of a checkpoint on the
// device, and a thread's share of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::internal::cuda {

// Rows of one or two matrices of equal size, in device memory: staged rows, or a whole source.
template <class Byte>
struct DeviceRows {
  struct Matrix {
    Byte* codes;            // (rows, K/2); row r at codes + r * codes_stride
    Byte* scales;           // (rows, K/16)
    int64_t codes_stride;   // bytes
    int64_t scales_stride;  // bytes
    int32_t shift;  // of the weights under fp8 (core/fp8.h), for tiles whose scales contain it
  };
  Matrix matrices[2];
  int64_t rows;  // of each
  int64_t k;
  int projections;  // 1: down, or up without a gate; 2: gate and up, joined in granules of 8

  // Row m of their tiles: its projection and row, or row -1 if the matrix has no such row.
  __device__ JoinedRow at(int64_t m) const {
    JoinedRow found = projections == 2 ? joined_row(m) : JoinedRow{0, m};
    if (found.row >= rows) found.row = -1;
    return found;
  }
};
using SourceRows = DeviceRows<const uint8_t>;
using StagedRows = DeviceRows<uint8_t>;

// One thread's share: the 16 bytes of codes that a lane of a GEMM reads at once, a uint4 of the
// tile.
struct LaneVec {
  int64_t row_tile, k_tile;
  int group, half, lane;
  __device__ explicit LaneVec(int64_t index, int64_t k_tiles) {
    lane = static_cast<int>(index % 32);
    half = static_cast<int>(index / 32 % kHalves);
    group = static_cast<int>(index / (32 * kHalves) % kGroups);
    const int64_t tile = index / (32 * kHalves * kGroups);
    k_tile = tile % k_tiles;
    row_tile = tile / k_tiles;
  }
  __device__ int64_t row(int i) const {
    return row_tile * kTileRows + group * kGroupRows + lane / 4 + 8 * i;
  }
  __device__ int64_t block(int step) const {
    return k_tile * (kTileK / 16) + half * kStepsPerLane + step;
  }
};
inline constexpr int kVecsPerTile = 32 * kHalves * kGroups;
inline constexpr int kPackThreads = 256;
inline unsigned pack_ctas(int64_t vecs) {
  return static_cast<unsigned>(ceil_div(vecs, kPackThreads));
}

}  // namespace nvfp4_moe::internal::cuda
