// product_rate: measures wgmma m64n128k16 only, with A in registers and B in shared memory, as the
// GEMMs issue it.
#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/measure.h"
#include "backend/cuda/ptx/address.cuh"
#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/registers.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/sm90/measure.h"

namespace nvfp4_moe::internal::sm90 {
namespace {

namespace ptx = cuda::ptx;

constexpr int kWarpgroups = 2, kMeasureThreads = kWarpgroups * 128;
constexpr int kRows = 128, kSteps = 4;  // B: 128 rows of 64 k
constexpr int kRounds = 1024;

__device__ uint32_t operand(uint32_t seed) {  // magnitudes near 1, signs and low bits from a hash
  seed = (seed ^ 61u ^ seed >> 16) * 0x9E3779B1u;
  seed ^= seed >> 15;
  return (seed & 0x807F807Fu) | 0x3F003F00u;
}

__global__ void __launch_bounds__(kMeasureThreads, 1) sm90_multiply(float* out) {
  __shared__ __align__(1024) uint32_t rows[kRows * 32];
  for (int i = static_cast<int>(threadIdx.x); i < kRows * 32; i += kMeasureThreads)
    rows[i] = operand(i + 77777);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  const uint64_t b = ptx::wgmma_descriptor_128b(ptx::shared_address(rows));
  uint32_t a[kSteps * 4];
#pragma unroll
  for (int i = 0; i < kSteps * 4; ++i) a[i] = operand(threadIdx.x * 16 + i);
  float accumulators[kRows / 2] = {};
  ptx::pin(a);
  ptx::pin(accumulators);
  ptx::wgmma_fence();
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::wgmma(accumulators, a + 4 * step, b + 2 * step);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
  }
  ptx::wgmma_wait_group<0>();
  ptx::pin(accumulators);
  float sum = 0;
#pragma unroll
  for (float value : accumulators) sum += value;
  if (sum == 0.12345f) *out = sum;
}

}  // namespace

Result<double> product_rate(int device) {
  int count = 0;
  NVFP4_MOE_TRY(cuda::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
                            "multiprocessors"));
  NVFP4_MOE_ASSIGN(const Buffer out, cuda::allocate(256, device, "a measure's output"));
  constexpr int kCtasEach = 8;
  const unsigned ctas = static_cast<unsigned>(count) * kCtasEach;
  const double flop = 2.0 * 64 * kRows * 16 * kSteps * kRounds * kWarpgroups * ctas;
  return cuda::best_rate(device, flop, [&](void* stream) {
    sm90_multiply<<<ctas, kMeasureThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        reinterpret_cast<float*>(out.data()));
  });
}

}  // namespace nvfp4_moe::internal::sm90
