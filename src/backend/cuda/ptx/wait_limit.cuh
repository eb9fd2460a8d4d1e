// Bounds every wait of a kernel in builds with NVFP4_MOE_BOUNDED_WAITS (CMake's preset `bounded`):
// a wait past its limit reports its place in the source, barrier and phase to the host, and traps.
// In all other builds nothing here generates code, and kernels have the machine code as without it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/system.cuh"
#include "backend/cuda/ptx/wait_report.h"

namespace nvfp4_moe::internal::cuda::ptx {

// Checks make functions larger than the compiler inlines by itself, and wgmma is serialized around
// calls.
#ifdef NVFP4_MOE_BOUNDED_WAITS
#define NVFP4_MOE_INLINE_IF_BOUNDED __forceinline__
inline constexpr bool kBoundedWaits = true;
#else
#define NVFP4_MOE_INLINE_IF_BOUNDED
inline constexpr bool kBoundedWaits = false;
#endif

// The call of a waiting function: a default argument has the caller's place in the source.
struct WaitSite {
  uint32_t file, at;
};
__host__ __device__ consteval WaitSite wait_site(const char* file = __builtin_FILE(),
                                                 int at = __builtin_LINE()) {
  return {wait_file_hash(file), static_cast<uint32_t>(at)};
}

__device__ inline WaitReport* wait_report() {
  return reinterpret_cast<WaitReport*>(kWaitReportAddress);
}

class WaitLimit {
 public:
  __device__ WaitLimit(uint32_t barrier, uint32_t parity, WaitSite site)
      : barrier_(barrier), parity_(parity), site_(site) {}

  // Called after each poll.
  __device__ void check(bool done) {
    if constexpr (!kBoundedWaits) return;
    if (done) return;
    const auto now_us = static_cast<uint32_t>(global_timer() / 1000);
    if (begin_us_ == 0) {
      begin_us_ = now_us | 1;
      return;
    }
    const uint32_t waited_us = now_us - begin_us_,
                   limit_us = load_volatile(&wait_report()->limit_us);
    if (waited_us < limit_us) return;
    if (!reported_)
      report();
    else if (waited_us >= limit_us + limit_us / 4)
      __trap();
  }

 private:
  __device__ void report() {
    reported_ = true;
    if (__activemask() << (31 - threadIdx.x % 32) << 1 != 0) return;  // not the first lane
    const uint32_t index = atomicAdd(&wait_report()->waits_claimed, 1u);
    if (index >= kMaxLateWaits) return;
    uint4* const to = reinterpret_cast<uint4*>(&wait_report()->waits[index]);
    to[0] = {site_.file, site_.at, barrier_, parity_};
    to[1] = {blockIdx.x, threadIdx.x, begin_us_, 1};
    __threadfence_system();
  }

  uint32_t barrier_, parity_;
  WaitSite site_;
  uint32_t begin_us_ = 0;
  bool reported_ = false;
};

// Faults that the ladder's rehearsal plants; 0 otherwise.
__device__ inline bool is_planted() {
  const uint32_t threads = __ldg(&wait_report()->plant_threads);
  return threads == 0 || threads == blockDim.x;
}
// Bytes that a barrier expects in addition to those.
__device__ inline uint32_t planted_bytes(uint32_t bytes) {
  if constexpr (!kBoundedWaits) return 0;
  if (bytes < __ldg(&wait_report()->plant_least_bytes) || !is_planted()) return 0;
  return __ldg(&wait_report()->plant_bytes);
}
// Bits to flip in the stride of a matrix descriptor.
__device__ inline uint64_t planted_stride() {
  if constexpr (!kBoundedWaits) return 0;
  return is_planted() ? uint64_t{__ldg(&wait_report()->plant_stride)} << 32 : 0;
}

}  // namespace nvfp4_moe::internal::cuda::ptx
