// Checks block scales on the device that holds them, one thread per block, over gate, up and down.
// One report is read back: the first invalid scale of each matrix, and how many blocks with scale 0
// have nonzero codes. If there are any (no quantizer of this library writes them), these codes are
// read too. If they exceed the scratch memory, a second pass writes them to separately allocated
// memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>

#include "backend/cuda/device/device.h"
#include "backend/cuda/pack/source_check.h"
#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kCheckThreads = 256;
constexpr int kMostCheckCtas = 2048;
constexpr int kMatrices = 3;
constexpr const char* kNames[kMatrices] = {"gate", "up", "down"};

struct Found {
  int64_t block;   // row * (cols / 16) + block of the row
  uint64_t codes;  // its 8 bytes, as in memory
  int64_t projection;
};
struct Report {
  // of the first invalid scale: (row * (cols / 16) + block) << 8 | its byte
  unsigned long long illegal[kMatrices];
  unsigned int found;  // blocks with scale 0 and nonzero codes, including those beyond the capacity
};
constexpr unsigned long long kNone = ~0ull;
constexpr int64_t kFoundOffset = 64;
constexpr unsigned kCapacity = (kSourceCheckBytes - kFoundOffset) / sizeof(Found);
static_assert(sizeof(Report) <= kFoundOffset);

// Reads byte by byte: a source need not be aligned.
__global__ void __launch_bounds__(kCheckThreads)
    check_blocks(Nvfp4View matrix, int projection, Report* report, Found* found,
                 unsigned capacity) {
  const int64_t blocks_of_row = matrix.cols / 16, blocks = matrix.rows * blocks_of_row;
  for (int64_t i = int64_t{blockIdx.x} * kCheckThreads + threadIdx.x; i < blocks;
       i += int64_t{gridDim.x} * kCheckThreads) {
    const int64_t row = i / blocks_of_row, block = i % blocks_of_row;
    const uint32_t scale = matrix.block_scales[row * matrix.scales_stride + block];
    if (scale >= 0x7F)
      atomicMin(&report->illegal[projection], static_cast<unsigned long long>(i) << 8 | scale);
    if (scale != 0) continue;
    const uint8_t* const codes = matrix.codes + row * matrix.codes_stride + block * 8;
    uint64_t packed = 0;
    for (int b = 0; b < 8; ++b) packed |= uint64_t{codes[b]} << 8 * b;
    if (packed == 0) continue;
    const unsigned slot = atomicAdd(&report->found, 1u);
    if (slot < capacity) found[slot] = {i, packed, projection};
  }
}

// One pass over the three matrices. found: (capacity).
Result<Report> check_all(const ExpertSource& source, Report* report, Found* found,
                         unsigned capacity) {
  const auto stream = static_cast<cudaStream_t>(source.stream);
  Report result{{kNone, kNone, kNone}, 0};
  NVFP4_MOE_TRY(
      check(cudaMemcpyAsync(report, &result, sizeof(result), cudaMemcpyHostToDevice, stream),
            "check: start"));
  const Nvfp4View* const matrices[kMatrices] = {&source.gate, &source.up, &source.down};
  for (int p = 0; p < kMatrices; ++p) {
    const int64_t ctas = ceil_div(matrices[p]->rows * (matrices[p]->cols / 16), kCheckThreads);
    if (ctas == 0) continue;  // no gate
    check_blocks<<<static_cast<unsigned>(std::min<int64_t>(ctas, kMostCheckCtas)), kCheckThreads, 0,
                   stream>>>(*matrices[p], p, report, found, capacity);
    NVFP4_MOE_TRY(check_launch("check_blocks"));
  }
  NVFP4_MOE_TRY(
      check(cudaMemcpyAsync(&result, report, sizeof(result), cudaMemcpyDeviceToHost, stream),
            "check: report"));
  NVFP4_MOE_TRY(check(cudaStreamSynchronize(stream), "check: block scales"));
  return result;
}

Status check_memory(const char* matrix, const char* array, const void* data, int device) {
  cudaPointerAttributes attributes{};
  NVFP4_MOE_TRY(check(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes"));
  const bool on_device = attributes.type == cudaMemoryTypeDevice;
  if (attributes.type == cudaMemoryTypeManaged || (on_device && attributes.device == device))
    return {};
  return invalid_argument(
      std::string(matrix) + " " + array + ": expected memory of cuda:" + std::to_string(device) +
      ", got " + (on_device ? "cuda:" + std::to_string(attributes.device) : "host memory"));
}

}  // namespace

Result<std::vector<ZeroScaleCodes>> check_device_source(const ExpertSource& source, int device,
                                                        std::byte* scratch) {
  const Nvfp4View* const matrices[kMatrices] = {&source.gate, &source.up, &source.down};
  for (int p = 0; p < kMatrices; ++p) {
    if (matrices[p]->rows == 0) continue;  // no gate
    NVFP4_MOE_TRY(check_memory(kNames[p], "codes", matrices[p]->codes, device));
    NVFP4_MOE_TRY(check_memory(kNames[p], "block scales", matrices[p]->block_scales, device));
  }
  auto* const report = reinterpret_cast<Report*>(scratch);
  auto* found = reinterpret_cast<Found*>(scratch + kFoundOffset);
  NVFP4_MOE_ASSIGN(const Report result, check_all(source, report, found, kCapacity));
  for (int p = 0; p < kMatrices; ++p) {
    if (result.illegal[p] == kNone) continue;
    const auto block = static_cast<int64_t>(result.illegal[p] >> 8),
               blocks_of_row = matrices[p]->cols / 16;
    return illegal_block_scale(kNames[p], static_cast<uint8_t>(result.illegal[p]),
                               block / blocks_of_row, block % blocks_of_row);
  }
  std::vector<ZeroScaleCodes> kept;
  if (result.found == 0) return kept;
  Buffer more;
  if (result.found > kCapacity) {
    NVFP4_MOE_ASSIGN(
        more, allocate(result.found * sizeof(Found), device, "codes of blocks whose scale is 0"));
    found = reinterpret_cast<Found*>(more.data());
    NVFP4_MOE_TRY(check_all(source, report, found, result.found).status());
  }
  std::vector<Found> list(result.found);
  NVFP4_MOE_TRY(to_host(device, list.data(), found, list.size() * sizeof(Found), source.stream));
  std::sort(list.begin(), list.end(), [](const Found& a, const Found& b) {
    return std::tie(a.projection, a.block) < std::tie(b.projection, b.block);
  });
  for (const Found& one : list) {
    kept.push_back({static_cast<int>(one.projection), one.block, {}});
    std::memcpy(kept.back().codes.data(), &one.codes, sizeof(one.codes));
  }
  return kept;
}

}  // namespace nvfp4_moe::internal::cuda
