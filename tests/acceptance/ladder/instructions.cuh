// A kernel of one cta that maps words to words, and the instructions that all architectures from
// 9.0 on share: mbarrier, bulk copies and cp.async.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "acceptance/ladder/instructions.h"
#include "backend/cuda/ptx/address.cuh"
#include "backend/cuda/ptx/cp_async.cuh"
#include "backend/cuda/ptx/fence.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/tma.cuh"
#include "core/random.h"

namespace nvfp4_moe::internal::ladder {
namespace {

namespace ptx = cuda::ptx;
using Words = std::vector<uint32_t>;
using Kernel = void (*)(const uint32_t* from, uint32_t* to);

constexpr int kWords = 256;

inline Words random_words(size_t count, uint64_t seed = 1) {
  Random random(seed);
  Words words(count);
  for (uint32_t& word : words) word = static_cast<uint32_t>(random.next());
  return words;
}

// Launches one cta and compares what it writes with expected. place(i) names element i.
inline std::string compare(Kernel kernel, int threads, int shared_bytes, const Words& from,
                           const Words& expected,
                           const std::function<std::string(size_t)>& place = nullptr) {
  uint32_t *device_from = nullptr, *device_to = nullptr;
  Words to(expected.size(), 0xFFFFFFFFu);
  const size_t from_bytes = from.size() * 4, to_bytes = to.size() * 4;
  cudaError_t error = cudaMalloc(&device_from, from_bytes);
  if (error == cudaSuccess) error = cudaMalloc(&device_to, to_bytes);
  if (error == cudaSuccess)
    error = cudaMemcpy(device_from, from.data(), from_bytes, cudaMemcpyHostToDevice);
  if (error == cudaSuccess)
    error = cudaMemcpy(device_to, to.data(), to_bytes, cudaMemcpyHostToDevice);
  if (error == cudaSuccess && shared_bytes > 48 * 1024)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) {
    kernel<<<1, threads, static_cast<size_t>(shared_bytes)>>>(device_from, device_to);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess)
    error = cudaMemcpy(to.data(), device_to, to_bytes, cudaMemcpyDeviceToHost);
  cudaFree(device_from);
  cudaFree(device_to);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  size_t wrong = 0, first = 0;
  for (size_t i = to.size(); i-- > 0;)
    if (to[i] != expected[i]) ++wrong, first = i;
  if (wrong == 0) return "";
  const auto value = [&](uint32_t word) {
    float number;
    std::memcpy(&number, &word, 4);
    return place ? std::to_string(number) : std::to_string(word);
  };
  return std::to_string(wrong) + " of " + std::to_string(to.size()) + " values are wrong, first " +
         (place ? place(first) : "word " + std::to_string(first)) + ": expected " +
         value(expected[first]) + ", got " + value(to[first]);
}

// d (rows, cols) = a (rows, k) b (cols, k), as the bits of fp32.
inline Words product(const std::vector<float>& a, const std::vector<float>& b, int rows, int cols,
                     int k) {
  Words d(static_cast<size_t>(rows * cols));
  for (int row = 0; row < rows; ++row)
    for (int col = 0; col < cols; ++col) {
      float sum = 0;
      for (int i = 0; i < k; ++i)
        sum += a[static_cast<size_t>(row * k + i)] * b[static_cast<size_t>(col * k + i)];
      std::memcpy(&d[static_cast<size_t>(row * cols + col)], &sum, 4);
    }
  return d;
}
inline std::function<std::string(size_t)> element_of(int cols) {
  return [cols](size_t i) {
    const auto index = static_cast<int>(i);
    return "row " + std::to_string(index / cols) + " column " + std::to_string(index % cols);
  };
}

__device__ inline void init_barrier(uint32_t barrier, uint32_t arrivals) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, arrivals);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
}

// Two warps: the second writes and arrives, the first waits and reads, over four phases.
__global__ void mbarrier_kernel(const uint32_t* from, uint32_t* to) {
  __shared__ uint32_t words[kWords];
  __shared__ uint64_t full;
  const uint32_t barrier = ptx::shared_address(&full);
  init_barrier(barrier, 32);
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t phase = 0; phase < 4; ++phase) {
    const uint32_t at = phase * 32 + lane;
    if (threadIdx.x >= 32) {
      words[at] = from[at];
      ptx::mbarrier_arrive(barrier);
    }
    ptx::mbarrier_wait(barrier, phase % 2);
    if (threadIdx.x < 32) to[at] = words[at ^ 31];
  }
}
inline std::string mbarrier() {
  const Words from = random_words(128);
  Words expected(from.size());
  for (size_t i = 0; i < from.size(); ++i) expected[i] = from[i ^ 31];
  return compare(mbarrier_kernel, 64, 0, from, expected);
}

__global__ void bulk_copy_kernel(const uint32_t* from, uint32_t* to) {
  __shared__ __align__(128) uint32_t words[kWords];
  __shared__ uint64_t full;
  const uint32_t barrier = ptx::shared_address(&full);
  init_barrier(barrier, 1);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, sizeof words);
    ptx::copy_bulk(ptx::shared_address(words), from, sizeof words, barrier,
                   ptx::create_policy_evict_first());
  }
  ptx::mbarrier_wait(barrier, 0);
  for (uint32_t i = threadIdx.x; i < kWords; i += blockDim.x) to[i] = words[i];
}
inline std::string bulk_copy() {
  const Words words = random_words(kWords);
  return compare(bulk_copy_kernel, 32, 0, words, words);
}

// A barrier that counts the copies of each thread; every fourth writes zeros.
__global__ void cp_async_kernel(const uint32_t* from, uint32_t* to) {
  __shared__ __align__(128) uint32_t words[kWords];
  __shared__ uint64_t full;
  const uint32_t barrier = ptx::shared_address(&full);
  init_barrier(barrier, kWords / 4);
  const uint32_t at = threadIdx.x * 4;
  ptx::cp_async_16_if(ptx::shared_address(words + at), from + at, threadIdx.x % 4 != 3, true);
  ptx::cp_async_mbarrier_arrive_noinc(barrier);
  ptx::mbarrier_wait(barrier, 0);
  for (uint32_t i = threadIdx.x; i < kWords; i += blockDim.x) to[i] = words[i];
}
inline std::string cp_async() {
  const Words from = random_words(kWords);
  Words expected = from;
  for (size_t i = 0; i < expected.size(); ++i)
    if (i / 4 % 4 == 3) expected[i] = 0;
  return compare(cp_async_kernel, kWords / 4, 0, from, expected);
}

// Copies words of a prepared image of shared memory, which the asynchronous proxy reads next.
__device__ inline void fill_shared(uint8_t* shared, const uint32_t* from, uint32_t words) {
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x)
    reinterpret_cast<uint32_t*>(shared)[i] = from[i];
  ptx::fence_proxy_async_shared();
  __syncthreads();
}

inline std::vector<Instruction> with_common(std::vector<Instruction> own) {
  std::vector<Instruction> all = {
      {"mbarrier", mbarrier}, {"bulk-copy", bulk_copy}, {"cp-async", cp_async}};
  all.insert(all.end(), own.begin(), own.end());
  return all;
}

}  // namespace
}  // namespace nvfp4_moe::internal::ladder
