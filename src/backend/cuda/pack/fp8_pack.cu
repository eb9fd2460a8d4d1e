// Counts how many codes of each magnitude occur under each block scale of a matrix, one thread per
// block. The host derives the shift, and how many weights it rounds, from these counts
// (core/fp8.h).
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "backend/cuda/device/device.h"
#include "backend/cuda/pack/fp8_pack.h"
#include "backend/cuda/packed_tile.h"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kFp8PackThreads = 256;
constexpr int64_t kMostFp8PackCtas = 1024;
constexpr int kCounters = sizeof(Fp8Histogram) / sizeof(uint64_t);
constexpr int kMagnitudes = kCounters / 128;
constexpr uint32_t kEach = 0x11111111u;  // 1 in each nibble

// Reads byte by byte: a source need not be aligned.
__global__ void __launch_bounds__(kFp8PackThreads)
    count_fp8_codes(Nvfp4View matrix, unsigned long long* histogram) {
  __shared__ uint32_t counters[kCounters];
  for (int i = static_cast<int>(threadIdx.x); i < kCounters; i += kFp8PackThreads) counters[i] = 0;
  __syncthreads();
  const int64_t blocks_of_row = matrix.cols / 16, blocks = matrix.rows * blocks_of_row;
  for (int64_t i = int64_t{blockIdx.x} * kFp8PackThreads + threadIdx.x; i < blocks;
       i += int64_t{gridDim.x} * kFp8PackThreads) {
    const int64_t row = i / blocks_of_row, block = i % blocks_of_row;
    const uint32_t scale = matrix.block_scales[row * matrix.scales_stride + block] & 0x7Fu;
    const uint8_t* const codes = matrix.codes + row * matrix.codes_stride + block * 8;
    uint32_t words[2] = {};
    for (int b = 0; b < 8; ++b) words[b / 4] |= uint32_t{codes[b]} << b % 4 * 8;
    for (uint32_t magnitude = 0; magnitude < kMagnitudes; ++magnitude) {
      uint32_t found = 0;
      for (uint32_t word : words) {
        // A nibble's three low bits are 0 if it matches; otherwise adding 7 carries into its fourth
        // bit.
        const uint32_t other = (word ^ (kEach * magnitude)) & (kEach * 7);
        found += 8 - __popc((other + kEach * 7) & (kEach * 8));
      }
      if (found != 0) atomicAdd(&counters[scale * kMagnitudes + magnitude], found);
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kCounters; i += kFp8PackThreads)
    if (counters[i] != 0) atomicAdd(&histogram[i], static_cast<unsigned long long>(counters[i]));
}

}  // namespace

int64_t matrix_bytes(const ExpertSource& source) {
  int64_t size_bytes = 0;
  for (const Nvfp4View* view : {&source.gate, &source.up, &source.down})
    size_bytes += view->rows * (view->cols / 16 * 9);
  return size_bytes;
}

Result<ExpertSource> copy_to_device(const ExpertSource& source, void* stream, std::byte* memory) {
  ExpertSource copied = source;
  copied.on_device = true;
  copied.stream = stream;
  auto* next = reinterpret_cast<uint8_t*>(memory);
  const auto copy = [&](const uint8_t* from, int64_t rows, int64_t row_bytes,
                        int64_t stride) -> Result<uint8_t*> {
    uint8_t* const to = next;
    next += rows * row_bytes;
    const auto width = static_cast<size_t>(row_bytes);
    NVFP4_MOE_TRY(check(cudaMemcpy2DAsync(to, width, from, static_cast<size_t>(stride), width,
                                          static_cast<size_t>(rows), cudaMemcpyHostToDevice,
                                          static_cast<cudaStream_t>(stream)),
                        "pack: copy"));
    return to;
  };
  for (Nvfp4View* view : {&copied.gate, &copied.up, &copied.down}) {
    if (view->rows == 0) continue;  // no gate
    NVFP4_MOE_ASSIGN(const uint8_t* codes,
                     copy(view->codes, view->rows, view->cols / 2, view->codes_stride));
    NVFP4_MOE_ASSIGN(const uint8_t* scales,
                     copy(view->block_scales, view->rows, view->cols / 16, view->scales_stride));
    *view = Nvfp4View::contiguous(codes, scales, view->tensor_scale, view->rows, view->cols);
  }
  return copied;
}

Result<Fp8ExpertWeights> measure_device_source(const ExpertSource& source, int device,
                                               std::byte* scratch) {
  const auto stream = static_cast<cudaStream_t>(source.stream);
  auto* const counted = reinterpret_cast<unsigned long long*>(scratch);
  NVFP4_MOE_TRY(check(cudaMemsetAsync(counted, 0, kFp8CountBytes, stream), "pack: fp8 weights"));
  const Nvfp4View* const matrices[] = {&source.gate, &source.up, &source.down};
  for (int p = 0; p < 3; ++p) {
    if (matrices[p]->rows == 0) continue;  // no gate
    const int64_t ctas = ceil_div(matrices[p]->rows * (matrices[p]->cols / 16), kFp8PackThreads);
    count_fp8_codes<<<static_cast<unsigned>(std::min(ctas, kMostFp8PackCtas)), kFp8PackThreads, 0,
                      stream>>>(*matrices[p], counted + p * kCounters);
    NVFP4_MOE_TRY(check_launch("count_fp8_codes"));
  }
  std::array<Fp8Histogram, 3> histograms;
  NVFP4_MOE_TRY(to_host(device, histograms.data(), counted, sizeof(histograms), source.stream));
  return Fp8ExpertWeights{read_fp8_weights(histograms[0]), read_fp8_weights(histograms[1]),
                          read_fp8_weights(histograms[2])};
}

Result<DeviceScales> device_scales(const TensorScales& scales, const Fp8ExpertWeights& fp8) {
  const std::array<const char*, 3> names = {"gate", "up", "down"};
  const std::array<float, 3> given = {scales.gate, scales.up, scales.down};
  const std::array<int32_t, 3> shifts = {fp8.gate.shift, fp8.up.shift, fp8.down.shift};
  std::array<float, 3> scaled{};
  for (size_t p = 0; p < 3; ++p) {
    scaled[p] = std::ldexp(given[p], shifts[p]);
    if (shifts[p] != 0 && given[p] != 0 && !std::isnormal(scaled[p]))
      return unsupported(std::string(names[p]) + " tensor scale: expected one that times 2^" +
                         std::to_string(shifts[p]) +
                         " (the shift of its fp8 weights) is a normal float, got " +
                         std::to_string(given[p]));
  }
  return DeviceScales{{scaled[0], scaled[1], scaled[2]}, {shifts[0], shifts[1], shifts[2]}};
}

}  // namespace nvfp4_moe::internal::cuda
