// pack: checkpoint rows -> tiles in the order of the tensor cores' A fragments; unpack, its
// inverse; and the kernels of tiles for bf16 products (packed_tile.h).
//
// Host rows are copied unchanged into staging memory, at least 128 packed rows of a whole K at a
// time. Rows on the device are read directly. Then one thread writes one lane's 16 bytes of codes,
// and every fourth thread the scales of its two rows. Rows and k beyond the matrix get code 0 and
// scale 0. A block with scale 0 gets codes 0 in the tiles; if its codes are not all 0, they are
// kept on the host.
// Long because packing and unpacking share their offsets.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "backend/cuda/device/device.h"
#include "backend/cuda/pack/fp8_pack.h"
#include "backend/cuda/pack/pack.h"
#include "backend/cuda/pack/pack_rows.cuh"
#include "backend/cuda/pack/replace.h"
#include "backend/cuda/pack/source_check.h"
#include "backend/cuda/packed_layout.h"

namespace nvfp4_moe::internal::cuda {
namespace {

__global__ void pack_tiles(const __grid_constant__ SourceRows source, int64_t vecs, int64_t k_tiles,
                           uint8_t* tiles) {
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= vecs) return;
  const LaneVec vec(index, k_tiles);
  const int c = vec.lane % 4;
  uint32_t words[kStepsPerLane];
  uint32_t scales[kStepsPerLane] = {};  // UE5M3 of row r, and of r + 8 in bits 16..23
  for (int step = 0; step < kStepsPerLane; ++step) {
    const int64_t block = vec.block(step);
    uint32_t pairs[4] = {};  // bytes of a0..a3: low nibble even k
    for (int i = 0; i < 2; ++i) {
      const JoinedRow row = source.at(vec.row(i));
      uint32_t scale = 0;
      if (row.row >= 0 && block < source.k / 16) {
        const SourceRows::Matrix& matrix = source.matrices[row.projection];
        scale = matrix.scales[row.row * matrix.scales_stride + block];
        const uint8_t* codes = matrix.codes + row.row * matrix.codes_stride + block * 8;
        if (scale != 0) {
          pairs[i] = codes[c];
          pairs[i + 2] = codes[c + 4];
        }
      }
      scales[step] |= scale_to_ue5m3(scale) << 16 * i;
    }
    words[step] = pack_half(pairs[0] & 15, pairs[1] & 15, pairs[2] & 15, pairs[3] & 15) |
                  pack_half(pairs[0] >> 4, pairs[1] >> 4, pairs[2] >> 4, pairs[3] >> 4) << 16;
  }
  uint8_t* tile = tiles + (vec.row_tile * k_tiles + vec.k_tile) * kTileBytes;
  *reinterpret_cast<uint4*>(tile + lane_offset(vec.group, vec.half, vec.lane)) =
      make_uint4(words[0], words[1], words[2], words[3]);
  if (c != 0) return;
  *reinterpret_cast<uint2*>(tile + scale_offset(vec.group, vec.half, vec.lane / 4)) =
      make_uint2(pack_scales(scales[0], scales[1]), pack_scales(scales[2], scales[3]));
}

__global__ void unpack_tiles(const __grid_constant__ StagedRows staged, int64_t vecs,
                             int64_t k_tiles, const uint8_t* tiles) {
  const int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= vecs) return;
  const LaneVec vec(index, k_tiles);
  const int c = vec.lane % 4;
  const uint8_t* tile = tiles + (vec.row_tile * k_tiles + vec.k_tile) * kTileBytes;
  const auto* words =
      reinterpret_cast<const uint32_t*>(tile + lane_offset(vec.group, vec.half, vec.lane));
  const auto* scales =
      reinterpret_cast<const uint32_t*>(tile + scale_offset(vec.group, vec.half, vec.lane / 4));
  for (int step = 0; step < kStepsPerLane; ++step) {
    const int64_t block = vec.block(step);
    if (block >= staged.k / 16) continue;
    const uint32_t low = words[step] & 0xFFFF, high = words[step] >> 16;
    const uint32_t pair = scales_of_step(scales[step / 2], step % 2 != 0);
    for (int i = 0; i < 2; ++i) {
      const JoinedRow row = staged.at(vec.row(i));
      if (row.row < 0) continue;
      const StagedRows::Matrix& matrix = staged.matrices[row.projection];
      uint8_t* codes = matrix.codes + row.row * matrix.codes_stride + block * 8;
      codes[c] = static_cast<uint8_t>(unpack_half(low, i) | unpack_half(high, i) << 4);
      codes[c + 4] = static_cast<uint8_t>(unpack_half(low, i + 2) | unpack_half(high, i + 2) << 4);
      if (c == 0)
        matrix.scales[row.row * matrix.scales_stride + block] =
            static_cast<uint8_t>(scale_from_ue5m3(pair >> (4 + 16 * i) & 0xFF));
    }
  }
}

// Packing from the host, and unpacking, run in the calling thread's own stream, so that they do not
// wait for other threads' work.
const cudaStream_t kStream = cudaStreamPerThread;

// Matrices that share tiles: gate and up; or only down; or only up if there is no gate.
struct Joined {
  MatrixTiles tiles;
  int projections;
  int64_t rows, k;  // of each
  int32_t shifts[2] = {};
  int64_t rows_per_tile() const { return kTileRows / projections; }
};

constexpr int64_t kStagingBytes = 8 << 20;  // large enough that the start of a copy costs little

// Bytes of device memory that host rows are staged in, for rows of at most largest_k.
int64_t staging_bytes(int64_t largest_k) {
  return std::max(kStagingBytes, kTileRows * (largest_k / 16 * 9));
}

// Calls body(first row, staged memory, vecs, their tiles) for every run of tiles that fits into
// staging. tiles: of the joined matrices.
template <class Body>
Status for_each_run(const Buffer& memory, const Joined& joined, std::byte* joined_tiles,
                    const Body& body) {
  auto* const staging = reinterpret_cast<uint8_t*>(memory.data());
  auto* const tiles = reinterpret_cast<uint8_t*>(joined_tiles);
  const int64_t row_bytes = joined.k / 2 + joined.k / 16;
  const int64_t tile_bytes = joined.rows_per_tile() * joined.projections * row_bytes;
  const int64_t most = std::max<int64_t>(1, static_cast<int64_t>(memory.size_bytes()) / tile_bytes);
  for (int64_t tile = 0; tile < joined.tiles.row_tiles; tile += most) {
    const int64_t count = std::min(most, joined.tiles.row_tiles - tile);
    const int64_t first = tile * joined.rows_per_tile();
    const int64_t rows = std::min(count * joined.rows_per_tile(), joined.rows - first);
    StagedRows staged{{}, rows, joined.k, joined.projections};
    uint8_t* next = staging;
    for (int p = 0; p < joined.projections; ++p) {
      staged.matrices[p] = {next, next + rows * (joined.k / 2), joined.k / 2, joined.k / 16,
                            joined.shifts[p]};
      next += rows * row_bytes;
    }
    const int64_t vecs = count * joined.tiles.k_tiles * kVecsPerTile;
    NVFP4_MOE_TRY(body(first, staged, vecs, tiles + tile * joined.tiles.k_tiles * kTileBytes));
  }
  return {};
}

Status launch_pack(const SourceRows& rows, int64_t vecs, int64_t k_tiles, uint8_t* tiles,
                   void* stream) {
  pack_tiles<<<pack_ctas(vecs), kPackThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      rows, vecs, k_tiles, tiles);
  return check_launch("pack_tiles");
}
Status launch_unpack(const StagedRows& rows, int64_t vecs, int64_t k_tiles, const uint8_t* tiles,
                     void* stream) {
  unpack_tiles<<<pack_ctas(vecs), kPackThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      rows, vecs, k_tiles, tiles);
  return check_launch("unpack_tiles");
}

// Packs rows on the device directly.
Status pack_device_rows(const TileFormat& format, const Joined& joined, std::byte* tiles,
                        const Nvfp4View* const (&views)[2], cudaStream_t stream) {
  SourceRows source{{}, joined.rows, joined.k, joined.projections};
  for (int p = 0; p < joined.projections; ++p)
    source.matrices[p] = {views[p]->codes, views[p]->block_scales, views[p]->codes_stride,
                          views[p]->scales_stride, joined.shifts[p]};
  return format.pack(source, joined.tiles.row_tiles * joined.tiles.k_tiles * kVecsPerTile,
                     joined.tiles.k_tiles, reinterpret_cast<uint8_t*>(tiles), stream);
}

// Packs host rows through staging, a few tiles at a time.
Status pack_joined(const TileFormat& format, const Buffer& staging, const Joined& joined,
                   std::byte* joined_tiles, const Nvfp4View* const (&views)[2]) {
  return for_each_run(
      staging, joined, joined_tiles,
      [&](int64_t first, const StagedRows& staged, int64_t vecs, uint8_t* tiles) {
        SourceRows source{{}, staged.rows, staged.k, staged.projections};
        for (int p = 0; p < joined.projections; ++p) {
          const Nvfp4View& view = *views[p];
          const auto copy = [&](uint8_t* to, size_t width, const uint8_t* from, int64_t stride) {
            return check(cudaMemcpy2DAsync(to, width, from, static_cast<size_t>(stride), width,
                                           static_cast<size_t>(staged.rows), cudaMemcpyHostToDevice,
                                           kStream),
                         "pack: copy");
          };
          const StagedRows::Matrix& to = staged.matrices[p];
          NVFP4_MOE_TRY(copy(to.codes, static_cast<size_t>(joined.k / 2), view.row_codes(first),
                             view.codes_stride));
          NVFP4_MOE_TRY(copy(to.scales, static_cast<size_t>(joined.k / 16), view.row_scales(first),
                             view.scales_stride));
          source.matrices[p] = {to.codes, to.scales, to.codes_stride, to.scales_stride, to.shift};
        }
        return format.pack(source, vecs, joined.tiles.k_tiles, tiles, kStream);
      });
}

Status unpack_joined(const TileFormat& format, const Buffer& staging, const Joined& joined,
                     std::byte* joined_tiles, Nvfp4Buffers* const (&out)[2], cudaStream_t stream) {
  for (int p = 0; p < joined.projections; ++p) {
    out[p]->codes.resize(static_cast<size_t>(joined.rows * (joined.k / 2)));
    out[p]->block_scales.resize(static_cast<size_t>(joined.rows * (joined.k / 16)));
  }
  return for_each_run(
      staging, joined, joined_tiles,
      [&](int64_t first, const StagedRows& staged, int64_t vecs, const uint8_t* tiles) {
        NVFP4_MOE_TRY(format.unpack(staged, vecs, joined.tiles.k_tiles, tiles, stream));
        for (int p = 0; p < joined.projections; ++p) {
          const auto copy = [&](uint8_t* to, const uint8_t* from, int64_t row_bytes) {
            return check(cudaMemcpyAsync(to + first * row_bytes, from,
                                         static_cast<size_t>(staged.rows * row_bytes),
                                         cudaMemcpyDeviceToHost, stream),
                         "unpack: copy");
          };
          NVFP4_MOE_TRY(copy(out[p]->codes.data(), staged.matrices[p].codes, joined.k / 2));
          NVFP4_MOE_TRY(
              copy(out[p]->block_scales.data(), staged.matrices[p].scales, joined.k / 16));
        }
        return check(cudaStreamSynchronize(stream), "unpack");
      });
}

// Keeps nonzero codes under a scale of 0, which no quantizer of this library writes.
void keep_zero_scale_codes(const Nvfp4View& view, int projection,
                           std::vector<ZeroScaleCodes>& kept) {
  for (int64_t row = 0; row < view.rows; ++row) {
    const uint8_t* scales = view.row_scales(row);
    const uint8_t* const end = scales + view.cols / 16;
    for (const uint8_t* at = scales;
         (at = static_cast<const uint8_t*>(std::memchr(at, 0, end - at))) != nullptr; ++at) {
      ZeroScaleCodes found{projection, row * (view.cols / 16) + (at - scales), {}};
      std::memcpy(found.codes.data(), view.row_codes(row) + (at - scales) * 8, found.codes.size());
      if (found.codes != decltype(found.codes){}) kept.push_back(found);
    }
  }
}

struct PackedExpert {
  Joined gate_up, down;
  std::byte* gate_up_tiles;
  std::byte* down_tiles;
  int64_t index;          // into arrays whose last element is the shared expert's
  int64_t staging_bytes;  // for rows of either
  size_t biases_offset;   // for all experts
  bool gated;

  PackedExpert(const PackedWeights& weights, int64_t expert) {
    const PackedLayout layout(weights.config, weights.range);
    const PartLayout& part = layout.part_of(expert);
    const MoeConfig& config = weights.config;
    const int64_t hidden = config->hidden_size;
    const int64_t intermediate =
        expert == kSharedExpert ? config->shared_intermediate_size : config->intermediate_size;
    gated = has_gate(config->activation);
    gate_up = {part.gate_up, gated ? 2 : 1, intermediate, hidden};
    down = {part.down, 1, hidden, intermediate};
    gate_up_tiles = weights.bytes.data() + layout.expert_offset(expert);
    down_tiles = gate_up_tiles + part.gate_up.bytes();
    index = expert == kSharedExpert ? weights.range.count : expert;
    staging_bytes = cuda::staging_bytes(std::max(hidden, intermediate));
    biases_offset = static_cast<size_t>(layout.biases);
    take_shifts(weights.fp8_weights_of(expert));
  }
  void take_shifts(const Fp8ExpertWeights& fp8) {
    gate_up.shifts[0] = gated ? fp8.gate.shift : fp8.up.shift, gate_up.shifts[1] = fp8.up.shift;
    down.shifts[0] = fp8.down.shift;
  }
};

// Makes weights.staging at least that large.
Status reserve_staging(PackedWeights& weights, int64_t size_bytes) {
  if (static_cast<int64_t>(weights.staging.size_bytes()) >= size_bytes) return {};
  weights.staging = {};
  NVFP4_MOE_ASSIGN(weights.staging, allocate(static_cast<size_t>(size_bytes), weights.device,
                                             "staging for packing"));
  return {};
}

bool rounds_to_e4m3(const PackedWeights& weights) {
  return weights.config->activation_format == ActivationFormat::kFp8;
}

// Stores an expert's data other than tiles, all from host memory: its tensor scales, biases and,
// under fp8, how its weights become E4M3. `numbers` holds the values that the GEMMs read; it must
// live until the stream has been synchronized.
Status put_numbers(PackedWeights& weights, PackedExpert& packed, int64_t local_expert,
                   const ExpertSource& source, const Fp8ExpertWeights& fp8, DeviceScales& numbers,
                   cudaStream_t stream) {
  const auto index = static_cast<size_t>(packed.index);
  const TensorScales scales = {source.gate.tensor_scale, source.up.tensor_scale,
                               source.down.tensor_scale};
  NVFP4_MOE_ASSIGN(numbers, device_scales(scales, fp8));
  weights.tensor_scales[index] = scales;
  const auto copy = [&](void* to, const void* from, size_t bytes) {
    return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream),
                 "pack: tensor scales and biases");
  };
  std::byte* const to = weights.bytes.data();
  NVFP4_MOE_TRY(copy(to + index * sizeof(numbers.scales), &numbers.scales, sizeof(numbers.scales)));
  NVFP4_MOE_TRY(store_biases(weights, packed.biases_offset, local_expert, source.biases, copy));
  if (!rounds_to_e4m3(weights)) return {};
  weights.fp8_weights.resize(weights.tensor_scales.size());
  weights.fp8_weights[index] = fp8;
  packed.take_shifts(fp8);
  return copy(to + fp8_shifts_offset(weights.range) + index * sizeof(numbers.shifts),
              &numbers.shifts, sizeof(numbers.shifts));
}

// Packs the tiles of an expert whose matrices are on the device, and its numbers.
Status pack_on_device(const TileFormat& format, PackedWeights& weights, PackedExpert& packed,
                      int64_t local_expert, const ExpertSource& source, const Fp8ExpertWeights& fp8,
                      DeviceScales& numbers) {
  auto* const stream = static_cast<cudaStream_t>(source.stream);
  NVFP4_MOE_TRY(put_numbers(weights, packed, local_expert, source, fp8, numbers, stream));
  NVFP4_MOE_TRY(pack_device_rows(format, packed.gate_up, packed.gate_up_tiles,
                                 {packed.gated ? &source.gate : &source.up, &source.up}, stream));
  return pack_device_rows(format, packed.down, packed.down_tiles, {&source.down, nullptr}, stream);
}

// Under fp8 the first tile needs the shifts of whole matrices. So the expert is copied to the
// device and measured there: one host thread would take several times as long as the copy.
Status pack_fp8_from_host(const TileFormat& format, PackedWeights& weights, PackedExpert& packed,
                          int64_t local_expert, const ExpertSource& source, DeviceScales& numbers) {
  NVFP4_MOE_TRY(reserve_staging(weights, kFp8CountBytes + matrix_bytes(source)));
  std::byte* const counts = weights.staging.data();
  NVFP4_MOE_ASSIGN(const ExpertSource copied,
                   copy_to_device(source, kStream, counts + kFp8CountBytes));
  NVFP4_MOE_ASSIGN(const Fp8ExpertWeights fp8,
                   measure_device_source(copied, weights.device, counts));
  return pack_on_device(format, weights, packed, local_expert, copied, fp8, numbers);
}

// Packs the expert, and returns its nonzero codes under a scale of 0.
Result<std::vector<ZeroScaleCodes>> pack_from_host(const TileFormat& format, PackedWeights& weights,
                                                   PackedExpert& packed, int64_t local_expert,
                                                   const ExpertSource& source) {
  DeviceScales numbers;
  if (rounds_to_e4m3(weights)) {
    NVFP4_MOE_TRY(pack_fp8_from_host(format, weights, packed, local_expert, source, numbers));
  } else {
    NVFP4_MOE_TRY(reserve_staging(weights, packed.staging_bytes));
    NVFP4_MOE_TRY(put_numbers(weights, packed, local_expert, source, {}, numbers, kStream));
    NVFP4_MOE_TRY(pack_joined(format, weights.staging, packed.gate_up, packed.gate_up_tiles,
                              {packed.gated ? &source.gate : &source.up, &source.up}));
    NVFP4_MOE_TRY(pack_joined(format, weights.staging, packed.down, packed.down_tiles,
                              {&source.down, nullptr}));
  }
  std::vector<ZeroScaleCodes> kept;
  if (!format.holds_all_codes) {
    keep_zero_scale_codes(source.gate, 0, kept);
    keep_zero_scale_codes(source.up, 1, kept);
    keep_zero_scale_codes(source.down, 2, kept);
  }
  NVFP4_MOE_TRY(check(cudaStreamSynchronize(kStream), "pack"));
  return kept;
}

Result<std::vector<ZeroScaleCodes>> pack_from_device(const TileFormat& format,
                                                     PackedWeights& weights, PackedExpert& packed,
                                                     int64_t local_expert,
                                                     const ExpertSource& source) {
  const auto stream = static_cast<cudaStream_t>(source.stream);
  NVFP4_MOE_TRY(reserve_staging(weights, kSourceCheckBytes));
  NVFP4_MOE_ASSIGN(std::vector<ZeroScaleCodes> kept,
                   check_device_source(source, weights.device, weights.staging.data()));
  Fp8ExpertWeights fp8;
  if (rounds_to_e4m3(weights)) {
    static_assert(kFp8CountBytes <= kSourceCheckBytes);
    NVFP4_MOE_ASSIGN(fp8, measure_device_source(source, weights.device, weights.staging.data()));
  }
  DeviceScales numbers;
  NVFP4_MOE_TRY(pack_on_device(format, weights, packed, local_expert, source, fp8, numbers));
  if (format.holds_all_codes) kept.clear();
  NVFP4_MOE_TRY(check(cudaStreamSynchronize(stream), "pack"));
  return kept;
}

}  // namespace

constinit const TileFormat kBf16Tiles = {launch_pack, launch_unpack, false};

size_t packed_bytes(const MoeConfig& config, const ExpertRange& range) {
  return static_cast<size_t>(PackedLayout(config, range).total_bytes);
}

int64_t expert_staging_bytes(const PackedWeights& weights, int64_t local_expert) {
  const PackedExpert packed(weights, local_expert);
  if (!rounds_to_e4m3(weights)) return packed.staging_bytes;
  const auto bytes_of = [](const Joined& joined) {
    return joined.projections * joined.rows * (joined.k / 16 * 9);
  };
  return std::max(packed.staging_bytes,
                  kFp8CountBytes + bytes_of(packed.gate_up) + bytes_of(packed.down));
}

Status pack_expert(const TileFormat& format, PackedWeights& weights, int64_t local_expert,
                   const ExpertSource& source) {
  const DeviceGuard guard(weights.device);
  NVFP4_MOE_TRY(guard.status());
  PackedExpert packed(weights, local_expert);
  NVFP4_MOE_ASSIGN(std::vector<ZeroScaleCodes> kept,
                   source.on_device
                       ? pack_from_device(format, weights, packed, local_expert, source)
                       : pack_from_host(format, weights, packed, local_expert, source));
  weights.zero_scale_codes.resize(weights.tensor_scales.size());
  weights.zero_scale_codes[static_cast<size_t>(packed.index)] = std::move(kept);
  return {};
}

Status pack_matrix(const TileFormat& format, int device, const Nvfp4View& source, int32_t fp8_shift,
                   std::byte* tiles) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const Joined matrix{
      down_tiles(source.rows, source.cols), 1, source.rows, source.cols, {fp8_shift}};
  const auto size_bytes = static_cast<size_t>(staging_bytes(source.cols));
  NVFP4_MOE_ASSIGN(const Buffer staging, allocate(size_bytes, device, "staging for packing"));
  NVFP4_MOE_TRY(pack_joined(format, staging, matrix, tiles, {&source, nullptr}));
  return check(cudaStreamSynchronize(kStream), "pack");
}

Status unpack_expert(const TileFormat& format, const PackedWeights& weights, int64_t local_expert,
                     const LentStaging& lent, ExpertBuffers& out) {
  const DeviceGuard guard(weights.device);
  NVFP4_MOE_TRY(guard.status());
  const PackedExpert packed(weights, local_expert);
  const cudaStream_t stream =
      lent.stream != nullptr ? static_cast<cudaStream_t>(lent.stream) : kStream;
  Buffer own;
  if (lent.memory == nullptr) {  // several threads may unpack one layer at once
    NVFP4_MOE_ASSIGN(own, allocate(static_cast<size_t>(packed.staging_bytes), weights.device,
                                   "staging for unpacking"));
  }
  const Buffer& staging = lent.memory != nullptr ? *lent.memory : own;
  if (!packed.gated) out.gate = {};
  NVFP4_MOE_TRY(unpack_joined(format, staging, packed.gate_up, packed.gate_up_tiles,
                              {packed.gated ? &out.gate : &out.up, &out.up}, stream));
  NVFP4_MOE_TRY(
      unpack_joined(format, staging, packed.down, packed.down_tiles, {&out.down, nullptr}, stream));
  Nvfp4Buffers* const projections[] = {&out.gate, &out.up, &out.down};
  for (const ZeroScaleCodes& kept : weights.zero_scale_codes[static_cast<size_t>(packed.index)])
    std::memcpy(projections[kept.projection]->codes.data() + kept.block * 8, kept.codes.data(),
                kept.codes.size());
  out.scales = weights.tensor_scales_of(local_expert);
  NVFP4_MOE_TRY(
      unpack_biases(weights, packed.biases_offset, local_expert, out,
                    [stream](void* to, const void* from, size_t bytes) {
                      return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream),
                                   "unpack: biases");
                    }));
  return check(cudaStreamSynchronize(stream), "unpack");
}

}  // namespace nvfp4_moe::internal::cuda
