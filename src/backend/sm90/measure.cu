// product_rate: wgmma m64n128k16 with A in registers and B in shared memory, as the GEMMs issue it, and nothing else.
#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/measure.h"
#include "backend/sm90/measure.h"
#include "backend/sm90/wgmma.cuh"

namespace nvfp4_moe::sm90 {
namespace {

constexpr int kGroups = 2, kMeasureThreads = kGroups * 128;
constexpr int kLines = 128, kSteps = 4;  // B: 128 lines of 64 k
constexpr int kRounds = 1024;

__device__ uint32_t operand(uint32_t seed) {  // magnitudes near 1, signs and low bits of a hash
  seed = (seed ^ 61u ^ seed >> 16) * 0x9E3779B1u;
  seed ^= seed >> 15;
  return (seed & 0x807F807Fu) | 0x3F003F00u;
}

__global__ void __launch_bounds__(kMeasureThreads, 1) sm90_multiply(float* out) {
  __shared__ __align__(1024) uint32_t lines[kLines * 32];
  for (int i = static_cast<int>(threadIdx.x); i < kLines * 32; i += kMeasureThreads) lines[i] = operand(i + 77777);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const uint64_t b = lines_descriptor(static_cast<uint32_t>(__cvta_generic_to_shared(lines)));
  uint32_t a[kSteps * 4];
#pragma unroll
  for (int i = 0; i < kSteps * 4; ++i) a[i] = operand(threadIdx.x * 16 + i);
  float sums[kLines / 2] = {};
  pin(a);
  pin(sums);
  wgmma_fence();
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) wgmma(sums, a + 4 * step, b + 2 * step);
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  pin(sums);
  float sum = 0;
#pragma unroll
  for (float value : sums) sum += value;
  if (sum == 0.12345f) *out = sum;
}

}  // namespace

Result<double> product_rate(int device) {
  int count = 0;
  NVFP4_MOE_TRY(cuda::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessors"));
  NVFP4_MOE_ASSIGN(const Buffer out, cuda::allocate(256, device));
  constexpr int kBlocksEach = 8;
  const unsigned blocks = static_cast<unsigned>(count) * kBlocksEach;
  const double flop = 2.0 * 64 * kLines * 16 * kSteps * kRounds * kGroups * blocks;
  return cuda::best_rate(device, flop, [&](void* stream) {
    sm90_multiply<<<blocks, kMeasureThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        reinterpret_cast<float*>(out.data()));
  });
}

}  // namespace nvfp4_moe::sm90
