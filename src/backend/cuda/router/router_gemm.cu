// A router's GEMM for small batches: hidden (T, H) times weight (E, H) -> logits (T, E), in one
// kernel. A CTA handles one expert and up to 8 tokens. It is bound by latency, not by bytes: all
// reads of a row are issued before the first value is used, and the weights' reads before the
// kernel waits for the one that writes hidden.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/launch.cuh"
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/router/router.h"
#include "backend/cuda/steps/formats.cuh"

namespace nvfp4_moe::internal::cuda {
namespace {

constexpr int kGemmThreads = kRouterAccumulators / kRouterVector, kWarps = kGemmThreads / 32;
constexpr int kMostTokens = 8;  // per CTA
constexpr int kVectors = 8;     // of a row that a thread holds at once: H up to 8192 in one pass

__device__ uint4 vector_of(const void* row, int64_t vector, int64_t vectors) {
  return vector < vectors ? static_cast<const uint4*>(row)[vector] : uint4{};
}

// Adds the products of 8 elements, each to its own accumulator.
__device__ void add_products(float (&accumulators)[kRouterVector], const uint4& hidden,
                             const uint4& weight) {
  const uint32_t x[] = {hidden.x, hidden.y, hidden.z, hidden.w},
                 w[] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
  for (int i = 0; i < kRouterVector; i += 2) {
    accumulators[i] += __uint_as_float(x[i / 2] << 16) * __uint_as_float(w[i / 2] << 16);
    accumulators[i + 1] +=
        __uint_as_float(x[i / 2] & 0xFFFF0000u) * __uint_as_float(w[i / 2] & 0xFFFF0000u);
  }
}

// The total of a warp's accumulators, in every lane.
__device__ float warp_sum(float (&accumulators)[kRouterVector]) {
#pragma unroll
  for (int apart = kRouterVector / 2; apart > 0; apart /= 2)
#pragma unroll
    for (int i = 0; i < apart; ++i) accumulators[i] += accumulators[i + apart];
  float sum = accumulators[0];
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return sum;
}

// grid: (E, groups of kTokens tokens). One cta per multiprocessor is enough. Without that bound
// ptxas saves registers by loading into ones that it has just used, which makes reads wait for each
// other.
template <int kTokens>
__global__ void __launch_bounds__(kGemmThreads, 1) router_gemm_kernel(const RouterGemm call) {
  // vectors of each token's row that are requested together
  constexpr int kAhead = kVectors / kTokens;
  __shared__ float of_warps[kWarps][kTokens];
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t expert = blockIdx.x, first_token = int64_t{blockIdx.y} * kTokens,
                vectors = call.hidden_size / kRouterVector;
  const auto* const weight = static_cast<const uint16_t*>(call.weight) + expert * call.hidden_size;
  const auto* const hidden =
      static_cast<const uint16_t*>(call.hidden) + first_token * call.hidden_stride;
  uint4 w[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) w[i] = vector_of(weight, thread + i * kGemmThreads, vectors);
  ptx::grid_dependency_wait();
  ptx::launch_dependents();  // not earlier: later kernels may rely on what preceded this kernel

  float accumulators[kTokens][kRouterVector] = {};
#pragma unroll 1
  for (int64_t pass = 0; pass < vectors; pass += kVectors * kGemmThreads) {
    if (pass > 0) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        w[i] = vector_of(weight, pass + thread + i * kGemmThreads, vectors);
    }
#pragma unroll
    for (int i = 0; i < kVectors; i += kAhead) {
      if (pass + i * kGemmThreads >= vectors) break;
      uint4 x[kTokens][kAhead];
#pragma unroll
      for (int token = 0; token < kTokens; ++token)
#pragma unroll
        for (int j = 0; j < kAhead; ++j)
          x[token][j] =
              vector_of(hidden + token * call.hidden_stride, pass + thread + (i + j) * kGemmThreads,
                        first_token + token < call.tokens ? vectors : 0);
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
#pragma unroll
        for (int token = 0; token < kTokens; ++token)
          add_products(accumulators[token], x[token][j], w[i + j]);
    }
  }
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    const float sum = warp_sum(accumulators[token]);
    if (thread % 32 == 0) of_warps[thread / 32][token] = sum;
  }
  __syncthreads();
  static_assert(kWarps == 4);
  if (thread >= kTokens || first_token + thread >= call.tokens) return;
  const float logit =
      (of_warps[0][thread] + of_warps[2][thread]) + (of_warps[1][thread] + of_warps[3][thread]);
  const int64_t at = (first_token + thread) * call.num_experts + expert;
  if (call.logits_dtype == DType::kF32)
    static_cast<float*>(call.logits)[at] = logit;
  else
    static_cast<uint16_t*>(call.logits)[at] = bf16_from_float(logit);
}

template <int kTokens>
Status launch_router_gemm(const RouterGemm& call, void* stream) {
  const dim3 ctas(static_cast<unsigned>(call.num_experts),
                  static_cast<unsigned>((call.tokens + kTokens - 1) / kTokens));
  return launch<router_gemm_kernel<kTokens>>("router_gemm", ctas, kGemmThreads, 0, stream, call);
}

}  // namespace

Status router_gemm(int device, const RouterGemm& call, void* stream) {
  constexpr int64_t kMost = int64_t{65535} * kMostTokens;  // limit of a grid along y
  if (call.tokens == 0) return {};
  if (call.tokens > kMost)
    return invalid_argument("tokens: expected at most " + std::to_string(kMost) + ", got " +
                            std::to_string(call.tokens));
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  switch (call.tokens) {
    case 1: return launch_router_gemm<1>(call, stream);
    case 2: return launch_router_gemm<2>(call, stream);
    case 3:
    case 4: return launch_router_gemm<4>(call, stream);
    default: return launch_router_gemm<kMostTokens>(call, stream);
  }
}

}  // namespace nvfp4_moe::internal::cuda
