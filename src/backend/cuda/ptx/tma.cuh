// The Tensor Memory Accelerator: bulk and tensor copies from global to shared memory that one
// thread issues, and their cache policies. All complete on an mbarrier with the number of bytes
// written.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace nvfp4_moe::internal::cuda::ptx {

// createpolicy.fractional.L2::evict_first: for data that is read once, so that it does not evict
// other data from L2.
__device__ inline uint64_t create_policy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// createpolicy.fractional.L2::evict_normal: for data that other ctas read soon.
__device__ inline uint64_t create_policy_evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// cp.async.bulk.shared::cluster.global with a cache hint. bytes and both addresses are multiples of
// 16.
__device__ inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t mbarrier,
                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(mbarrier), "l"(policy)
      : "memory");
}

// cp.async.bulk.tensor.2d: copies a tile of a tensor, starting at element (x, y); x is the
// contiguous dimension. Elements outside the tensor become zeros. The barrier receives the whole
// tile's bytes, including those.
__device__ inline void copy_tensor_2d(uint32_t to, const CUtensorMap& map, int32_t x, int32_t y,
                                      uint32_t mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(mbarrier)
      : "memory");
}

}  // namespace nvfp4_moe::internal::cuda::ptx
