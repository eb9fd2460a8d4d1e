// The kernels that pack checkpoint rows into FP4 tiles (weight_tile.h) and unpack them. Bytes are
// moved, not changed.
//
// Each thread handles one lane's 16 bytes of codes; the first two of each four also handle the
// scales of one row. Rows and k beyond the matrix get code 0 and scale 0.
#include <cuda_runtime.h>

#include "backend/cuda/device/check.h"
#include "backend/cuda/pack/pack_rows.cuh"
#include "backend/sm120/pack.h"
#include "backend/sm120/weight_tile.h"

namespace nvfp4_moe::internal::sm120 {
namespace {

constexpr int kBlocksPerHalf = kStepK / 16;

// The packed index of row `row` of the group.
__device__ int64_t packed_row(const cuda::LaneVec& vec, int row) {
  return vec.row_tile * cuda::kTileRows + vec.group * cuda::kGroupRows + row;
}

__global__ void __launch_bounds__(cuda::kPackThreads)
    pack_fp4_tiles(const __grid_constant__ cuda::SourceRows source, int64_t vecs, int64_t k_tiles,
                   uint8_t* tiles) {
  const int64_t index = int64_t{blockIdx.x} * cuda::kPackThreads + threadIdx.x;
  if (index >= vecs) return;
  const cuda::LaneVec vec(index, k_tiles);
  uint8_t* const tile = tiles + (vec.row_tile * k_tiles + vec.k_tile) * cuda::kTileBytes;
  uint32_t words[kWordsPerLane] = {};
#pragma unroll
  for (int i = 0; i < kWordsPerLane; ++i) {
    const CodeWord word = code_word(vec.lane, i);
    const cuda::JoinedRow row = source.at(packed_row(vec, word.row));
    const int64_t block = vec.block(word.k / 16);
    if (row.row < 0 || block >= source.k / 16) continue;
    const auto& matrix = source.matrices[row.projection];
    const uint8_t* const codes =
        matrix.codes + row.row * matrix.codes_stride + block * 8 + word.k % 16 / 2;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) words[i] |= uint32_t{codes[byte]} << byte * 8;
  }
  *reinterpret_cast<uint4*>(tile + cuda::lane_offset(vec.group, vec.half, vec.lane)) =
      make_uint4(words[0], words[1], words[2], words[3]);
  if (vec.lane % 4 >= 2) return;
  const int own = scale_row(vec.lane);
  const cuda::JoinedRow row = source.at(packed_row(vec, own));
  uint32_t scales = 0;
#pragma unroll
  for (int i = 0; i < kBlocksPerHalf; ++i) {
    const int64_t block = vec.block(i);
    if (row.row < 0 || block >= source.k / 16) continue;
    const auto& matrix = source.matrices[row.projection];
    scales |= uint32_t{matrix.scales[row.row * matrix.scales_stride + block]} << i * 8;
  }
  *reinterpret_cast<uint32_t*>(tile + scale_word_offset(vec.group, vec.half, own)) = scales;
}

__global__ void __launch_bounds__(cuda::kPackThreads)
    unpack_fp4_tiles(const __grid_constant__ cuda::StagedRows staged, int64_t vecs, int64_t k_tiles,
                     const uint8_t* tiles) {
  const int64_t index = int64_t{blockIdx.x} * cuda::kPackThreads + threadIdx.x;
  if (index >= vecs) return;
  const cuda::LaneVec vec(index, k_tiles);
  const uint8_t* const tile = tiles + (vec.row_tile * k_tiles + vec.k_tile) * cuda::kTileBytes;
  const auto* const words =
      reinterpret_cast<const uint32_t*>(tile + cuda::lane_offset(vec.group, vec.half, vec.lane));
#pragma unroll
  for (int i = 0; i < kWordsPerLane; ++i) {
    const CodeWord word = code_word(vec.lane, i);
    const cuda::JoinedRow row = staged.at(packed_row(vec, word.row));
    const int64_t block = vec.block(word.k / 16);
    if (row.row < 0 || block >= staged.k / 16) continue;
    const auto& matrix = staged.matrices[row.projection];
    uint8_t* const codes =
        matrix.codes + row.row * matrix.codes_stride + block * 8 + word.k % 16 / 2;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) codes[byte] = static_cast<uint8_t>(words[i] >> byte * 8);
  }
  if (vec.lane % 4 >= 2) return;
  const int own = scale_row(vec.lane);
  const cuda::JoinedRow row = staged.at(packed_row(vec, own));
  const uint32_t scales =
      *reinterpret_cast<const uint32_t*>(tile + scale_word_offset(vec.group, vec.half, own));
#pragma unroll
  for (int i = 0; i < kBlocksPerHalf; ++i) {
    const int64_t block = vec.block(i);
    if (row.row < 0 || block >= staged.k / 16) continue;
    const auto& matrix = staged.matrices[row.projection];
    matrix.scales[row.row * matrix.scales_stride + block] = static_cast<uint8_t>(scales >> i * 8);
  }
}

Status launch_pack(const cuda::SourceRows& rows, int64_t vecs, int64_t k_tiles, uint8_t* tiles,
                   void* stream) {
  pack_fp4_tiles<<<cuda::pack_ctas(vecs), cuda::kPackThreads, 0,
                   static_cast<cudaStream_t>(stream)>>>(rows, vecs, k_tiles, tiles);
  return cuda::check_launch("pack_fp4_tiles");
}
Status launch_unpack(const cuda::StagedRows& rows, int64_t vecs, int64_t k_tiles,
                     const uint8_t* tiles, void* stream) {
  unpack_fp4_tiles<<<cuda::pack_ctas(vecs), cuda::kPackThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(rows, vecs, k_tiles, tiles);
  return cuda::check_launch("unpack_fp4_tiles");
}

}  // namespace

constinit const cuda::TileFormat kFp4Tiles = {launch_pack, launch_unpack, true};

}  // namespace nvfp4_moe::internal::sm120
