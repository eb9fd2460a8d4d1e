// The kernels that pack checkpoint rows into tiles for tcgen05 (weight_tile.h) and unpack them.
// Bytes are moved, not changed.
//
// Each thread handles 16 bytes of codes of one row (32 k) and, if they begin a step of 64 k, its
// word of scales. Rows and k beyond the matrix get code 0 and scale 0.
#include <cuda_runtime.h>

#include "backend/cuda/device/check.h"
#include "backend/cuda/pack/pack_rows.cuh"
#include "backend/sm100/pack.h"
#include "backend/sm100/weight_tile.h"

namespace nvfp4_moe::internal::sm100 {
namespace {

constexpr int kTileRowVecs = kWeightRowBytes / 16;  // per row of a tile
constexpr int kVecBlocks = 2, kStepBlocks = 4;      // of 16 elements
static_assert(kTileRowVecs * cuda::kTileRows == cuda::kVecsPerTile);

// One thread's 16 bytes of a copy.
struct RowVec {
  int64_t row_tile, k_tile;
  int row, vec;  // row within the tile; 16-byte vector within the row
  __device__ RowVec(int64_t index, int64_t k_tiles) {
    const int64_t tile = index / cuda::kVecsPerTile;
    vec = static_cast<int>(index % kTileRowVecs);
    row = static_cast<int>(index / kTileRowVecs % cuda::kTileRows);
    k_tile = tile % k_tiles;
    row_tile = tile / k_tiles;
  }
  __device__ int64_t packed_row() const { return row_tile * cuda::kTileRows + row; }
  // The first block of 16 elements, within the source's row.
  __device__ int64_t block() const { return k_tile * (cuda::kTileK / 16) + vec * kVecBlocks; }
  __device__ bool begins_step() const { return vec % 2 == 0; }
  __device__ int scales_offset() const { return weight_scales_offset(row, vec / 2); }
};

__global__ void __launch_bounds__(cuda::kPackThreads)
    pack_tcgen05_tiles(const __grid_constant__ cuda::SourceRows source, int64_t vecs,
                       int64_t k_tiles, uint8_t* tiles) {
  const int64_t index = int64_t{blockIdx.x} * cuda::kPackThreads + threadIdx.x;
  if (index >= vecs) return;
  const RowVec vec(index, k_tiles);
  uint8_t* const tile = tiles + (vec.row_tile * k_tiles + vec.k_tile) * cuda::kTileBytes;
  const cuda::JoinedRow row = source.at(vec.packed_row());
  const auto& matrix = source.matrices[row.projection];
  const int64_t blocks = row.row < 0 ? 0 : source.k / 16;
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kVecBlocks; ++i) {
    if (vec.block() + i >= blocks) continue;
    const uint8_t* const codes =
        matrix.codes + row.row * matrix.codes_stride + (vec.block() + i) * 8;
#pragma unroll
    for (int byte = 0; byte < 8; ++byte)
      words[2 * i + byte / 4] |= uint32_t{codes[byte]} << byte % 4 * 8;
  }
  *reinterpret_cast<uint4*>(tile + weight_codes_offset(vec.row, vec.vec)) =
      make_uint4(words[0], words[1], words[2], words[3]);
  if (!vec.begins_step()) return;
  uint32_t scales = 0;
#pragma unroll
  for (int i = 0; i < kStepBlocks; ++i)
    if (vec.block() + i < blocks)
      scales |= uint32_t{matrix.scales[row.row * matrix.scales_stride + vec.block() + i]} << i * 8;
  *reinterpret_cast<uint32_t*>(tile + vec.scales_offset()) = scales;
}

__global__ void __launch_bounds__(cuda::kPackThreads)
    unpack_tcgen05_tiles(const __grid_constant__ cuda::StagedRows staged, int64_t vecs,
                         int64_t k_tiles, const uint8_t* tiles) {
  const int64_t index = int64_t{blockIdx.x} * cuda::kPackThreads + threadIdx.x;
  if (index >= vecs) return;
  const RowVec vec(index, k_tiles);
  const uint8_t* const tile = tiles + (vec.row_tile * k_tiles + vec.k_tile) * cuda::kTileBytes;
  const cuda::JoinedRow row = staged.at(vec.packed_row());
  if (row.row < 0) return;
  const auto& matrix = staged.matrices[row.projection];
  const int64_t blocks = staged.k / 16;
  const uint8_t* const from = tile + weight_codes_offset(vec.row, vec.vec);
#pragma unroll
  for (int i = 0; i < kVecBlocks; ++i) {
    if (vec.block() + i >= blocks) continue;
    uint8_t* const codes = matrix.codes + row.row * matrix.codes_stride + (vec.block() + i) * 8;
#pragma unroll
    for (int byte = 0; byte < 8; ++byte) codes[byte] = from[i * 8 + byte];
  }
  if (!vec.begins_step()) return;
#pragma unroll
  for (int i = 0; i < kStepBlocks; ++i)
    if (vec.block() + i < blocks)
      matrix.scales[row.row * matrix.scales_stride + vec.block() + i] =
          tile[vec.scales_offset() + i];
}

Status launch_pack(const cuda::SourceRows& rows, int64_t vecs, int64_t k_tiles, uint8_t* tiles,
                   void* stream) {
  pack_tcgen05_tiles<<<cuda::pack_ctas(vecs), cuda::kPackThreads, 0,
                       static_cast<cudaStream_t>(stream)>>>(rows, vecs, k_tiles, tiles);
  return cuda::check_launch("pack_tcgen05_tiles");
}
Status launch_unpack(const cuda::StagedRows& rows, int64_t vecs, int64_t k_tiles,
                     const uint8_t* tiles, void* stream) {
  unpack_tcgen05_tiles<<<cuda::pack_ctas(vecs), cuda::kPackThreads, 0,
                         static_cast<cudaStream_t>(stream)>>>(rows, vecs, k_tiles, tiles);
  return cuda::check_launch("unpack_tcgen05_tiles");
}

}  // namespace

constinit const cuda::TileFormat kFp4Tiles = {launch_pack, launch_unpack, true};

}  // namespace nvfp4_moe::internal::sm100
