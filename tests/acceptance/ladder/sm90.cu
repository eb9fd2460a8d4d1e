// Single instructions of Hopper: one TMA tile, one wgmma of each operand format.
#include "acceptance/ladder/instructions.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/sm90/tensor_map.h"
#include "core/float_formats.h"

namespace nvfp4_moe::internal::ladder {
namespace {

constexpr int kRows = 16, kRowBytes = 128;  // of a swizzled operand

// Byte b of row r in the 128-byte swizzle.
constexpr int swizzled(int r, int b) { return r * kRowBytes + ((b / 16) ^ (r & 7)) * 16 + b % 16; }

__global__ void tma_kernel(const __grid_constant__ CUtensorMap map, uint32_t* to) {
  __shared__ __align__(1024) uint32_t words[kRows * kRowBytes / 4];
  __shared__ uint64_t full;
  const uint32_t barrier = ptx::shared_address(&full);
  init_barrier(barrier, 1);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, sizeof words);
    ptx::copy_tensor_2d(ptx::shared_address(words), map, kRowBytes, 8, barrier);
  }
  ptx::mbarrier_wait(barrier, 0);
  for (uint32_t i = threadIdx.x; i < sizeof words / 4; i += blockDim.x) to[i] = words[i];
}

// A tile that begins in row 8 and in the second 128 bytes of a tensor of 20 rows: the last four
// rows of the tile are zeros.
std::string tma() {
  constexpr int kTensorRows = 20, kTensorBytes = 256;
  const Words from = random_words(kTensorRows * kTensorBytes / 4);
  Words expected(kRows * kRowBytes / 4, 0), to(expected.size());
  for (int row = 0; row + 8 < kTensorRows; ++row)
    for (int b = 0; b < kRowBytes; b += 4)
      expected[static_cast<size_t>(swizzled(row, b) / 4)] =
          from[static_cast<size_t>(((row + 8) * kTensorBytes + kRowBytes + b) / 4)];
  if (const Status found = sm90::find_tensor_map_encoder(); !found.ok()) return found.message();
  std::byte* device = nullptr;
  uint32_t* device_to = nullptr;
  cudaError_t error = cudaMalloc(&device, from.size() * 4);
  if (error == cudaSuccess) error = cudaMalloc(&device_to, to.size() * 4);
  if (error == cudaSuccess)
    error = cudaMemcpy(device, from.data(), from.size() * 4, cudaMemcpyHostToDevice);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const auto map = sm90::rows_map(device, kTensorRows, kTensorBytes, kRows, kRowBytes);
  if (!map.ok()) return map.status().message();
  tma_kernel<<<1, 32>>>(*map, device_to);
  error = cudaGetLastError();
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess)
    error = cudaMemcpy(to.data(), device_to, to.size() * 4, cudaMemcpyDeviceToHost);
  cudaFree(device);
  cudaFree(device_to);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  for (size_t i = 0; i < to.size(); ++i)
    if (to[i] != expected[i])
      return "word " + std::to_string(i) + " of the tile: expected " + std::to_string(expected[i]) +
             ", got " + std::to_string(to[i]);
  return "";
}

// from: fragments of a (thread, 4), then the swizzled rows of b. to: d (64, 16).
template <bool kFp8>
__global__ void wgmma_kernel(const uint32_t* from, uint32_t* to) {
  __shared__ __align__(1024) uint8_t rows[kRows * kRowBytes];
  constexpr int kFragments = 128 * 4;
  fill_shared(rows, from + kFragments, sizeof rows / 4);
  uint32_t a[4];
  for (int i = 0; i < 4; ++i) a[i] = from[threadIdx.x * 4 + i];
  float d[8] = {};
  ptx::wgmma_fence();
  const uint64_t b = ptx::wgmma_descriptor_128b(ptx::shared_address(rows));
  if constexpr (kFp8)
    ptx::wgmma_e4m3(d, a, b);
  else
    ptx::wgmma(d, a, b);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  for (uint32_t j = 0; j < 2; ++j)
    for (uint32_t i = 0; i < 4; ++i)
      to[(warp * 16 + r + i / 2 * 8) * kRows + 8 * j + 2 * c + i % 2] =
          __float_as_uint(d[4 * j + i]);
}

template <bool kFp8>
std::string wgmma() {
  constexpr int kM = 64, kK = kFp8 ? 32 : 16, kBytes = kFp8 ? 1 : 2, kPerWord = 4 / kBytes;
  Random random(kFp8 ? 3 : 2);
  std::vector<float> a(kM * kK), b(kRows * kK);
  for (std::vector<float>* matrix : {&a, &b})
    for (float& value : *matrix) value = static_cast<float>(random.below(9) - 4);
  const auto bits = [](float value) {
    return static_cast<uint32_t>(kFp8 ? e4m3_from_float(value) : bf16_from_float(value));
  };
  Words from(128 * 4 + kRows * kRowBytes / 4, 0);
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < 4; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
      const int k = (thread % 4 + i / 2 * 4) * kPerWord;
      for (int e = 0; e < kPerWord; ++e)
        from[static_cast<size_t>(thread * 4 + i)] |= bits(a[static_cast<size_t>(row * kK + k + e)])
                                                     << (e * kBytes * 8);
    }
  for (int n = 0; n < kRows; ++n)
    for (int k = 0; k < kK; ++k) {
      const int at = swizzled(n, k * kBytes);
      from[static_cast<size_t>(128 * 4 + at / 4)] |= bits(b[static_cast<size_t>(n * kK + k)])
                                                     << (at % 4 * 8);
    }
  return compare(wgmma_kernel<kFp8>, 128, 0, from, product(a, b, kM, kRows, kK), element_of(kRows));
}

}  // namespace

std::vector<Instruction> sm90_instructions() {
  return with_common({{"tma", tma}, {"wgmma-bf16", wgmma<false>}, {"wgmma-e4m3", wgmma<true>}});
}

}  // namespace nvfp4_moe::internal::ladder
