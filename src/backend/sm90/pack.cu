// The kernels that pack checkpoint rows into tiles for E4M3 products (fp8_tile.h) and unpack them.
// Codes are moved, and scales are stored without the shift of their matrix.
//
// Each thread handles one lane's 16 bytes of codes (one block of each of two rows) and both scales.
// Rows and k beyond the matrix get code 0 and scale 0.
#include <cuda_runtime.h>

#include "backend/cuda/device/check.h"
#include "backend/cuda/pack/pack_rows.cuh"
#include "backend/sm90/fp8_tile.h"
#include "backend/sm90/pack.h"

namespace nvfp4_moe::internal::sm90 {
namespace {

constexpr int kCodeBytes = 8;  // per block

__global__ void __launch_bounds__(cuda::kPackThreads)
    pack_fp8_tiles(const __grid_constant__ cuda::SourceRows source, int64_t vecs, int64_t k_tiles,
                   uint8_t* tiles) {
  const int64_t index = int64_t{blockIdx.x} * cuda::kPackThreads + threadIdx.x;
  if (index >= vecs) return;
  const cuda::LaneVec vec(index, k_tiles);
  const int64_t block = vec.block(vec.lane % 4);
  uint32_t words[4] = {}, scales = 0;
  for (int i = 0; i < 2; ++i) {
    const cuda::JoinedRow row = source.at(vec.row(i));
    if (row.row < 0 || block >= source.k / 16) continue;
    const cuda::SourceRows::Matrix& matrix = source.matrices[row.projection];
    scales |= fp8_scale_index(matrix.scales[row.row * matrix.scales_stride + block], matrix.shift)
              << 8 * i;
    const uint8_t* const codes = matrix.codes + row.row * matrix.codes_stride + block * kCodeBytes;
    for (int w = 0; w < 2; ++w) {
      uint32_t in_order = 0;
      for (int byte = 0; byte < 4; ++byte) in_order |= uint32_t{codes[4 * w + byte]} << byte * 8;
      words[2 * i + w] = pack_fp8_word(in_order);
    }
  }
  uint8_t* const tile = tiles + (vec.row_tile * k_tiles + vec.k_tile) * cuda::kTileBytes;
  *reinterpret_cast<uint4*>(tile + cuda::lane_offset(vec.group, vec.half, vec.lane)) =
      make_uint4(words[0], words[1], words[2], words[3]);
  *reinterpret_cast<uint16_t*>(tile + fp8_scales_offset(vec.group, vec.half, vec.lane)) =
      static_cast<uint16_t>(scales);
}

__global__ void __launch_bounds__(cuda::kPackThreads)
    unpack_fp8_tiles(const __grid_constant__ cuda::StagedRows staged, int64_t vecs, int64_t k_tiles,
                     const uint8_t* tiles) {
  const int64_t index = int64_t{blockIdx.x} * cuda::kPackThreads + threadIdx.x;
  if (index >= vecs) return;
  const cuda::LaneVec vec(index, k_tiles);
  const int64_t block = vec.block(vec.lane % 4);
  if (block >= staged.k / 16) return;
  const uint8_t* const tile = tiles + (vec.row_tile * k_tiles + vec.k_tile) * cuda::kTileBytes;
  const auto* const words =
      reinterpret_cast<const uint32_t*>(tile + cuda::lane_offset(vec.group, vec.half, vec.lane));
  const uint32_t scales =
      *reinterpret_cast<const uint16_t*>(tile + fp8_scales_offset(vec.group, vec.half, vec.lane));
  for (int i = 0; i < 2; ++i) {
    const cuda::JoinedRow row = staged.at(vec.row(i));
    if (row.row < 0) continue;
    const cuda::StagedRows::Matrix& matrix = staged.matrices[row.projection];
    matrix.scales[row.row * matrix.scales_stride + block] =
        static_cast<uint8_t>(fp8_scale_byte(scales >> 8 * i & 0xFF, matrix.shift));
    uint8_t* const codes = matrix.codes + row.row * matrix.codes_stride + block * kCodeBytes;
    for (int w = 0; w < 2; ++w) {
      const uint32_t in_order = unpack_fp8_word(words[2 * i + w]);
      for (int byte = 0; byte < 4; ++byte)
        codes[4 * w + byte] = static_cast<uint8_t>(in_order >> byte * 8);
    }
  }
}

Status launch_pack(const cuda::SourceRows& rows, int64_t vecs, int64_t k_tiles, uint8_t* tiles,
                   void* stream) {
  pack_fp8_tiles<<<cuda::pack_ctas(vecs), cuda::kPackThreads, 0,
                   static_cast<cudaStream_t>(stream)>>>(rows, vecs, k_tiles, tiles);
  return cuda::check_launch("pack_fp8_tiles");
}
Status launch_unpack(const cuda::StagedRows& rows, int64_t vecs, int64_t k_tiles,
                     const uint8_t* tiles, void* stream) {
  unpack_fp8_tiles<<<cuda::pack_ctas(vecs), cuda::kPackThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(rows, vecs, k_tiles, tiles);
  return cuda::check_launch("unpack_fp8_tiles");
}

}  // namespace

constinit const cuda::TileFormat kFp8Tiles = {launch_pack, launch_unpack, true};

}  // namespace nvfp4_moe::internal::sm90
