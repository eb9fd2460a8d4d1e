// Bounds every wait of a kernel in builds with NVFP4_MOE_BOUNDED_WAITS (CMake's preset `bounded`):
// a wait past its limit reports its place in the source, barrier and phase to the host, and traps.
// In all other builds nothing here generates code, and kernels have the machine code as without it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/ptx/system.cuh"
#include "backend/cuda/ptx/wait_report.h"

namespace nvfp4_moe::internal::cuda::ptx {

#ifdef NVFP4_MOE_BOUNDED_WAITS
inline constexpr bool kBoundedWaits = true;
#else
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
    if (polls_++ == 0) {
      begin_us_ = now_us;
      return;
    }
    const uint32_t limit_us = load_volatile(&wait_report()->limit_us);
    if (now_us - begin_us_ < limit_us) return;
    if (reported_) {
      if (now_us - begin_us_ >= limit_us + load_volatile(&wait_report()->grace_us)) __trap();
      return;
    }
    reported_ = true;
    const unsigned lanes = __activemask();
    if ((threadIdx.x & 31) == static_cast<unsigned>(__ffs(static_cast<int>(lanes))) - 1)
      add_to_report();
  }

 private:
  __device__ void add_to_report() const {
    const uint32_t index = atomicAdd(&wait_report()->waits_claimed, 1u);
    if (index >= kMaxLateWaits) return;
    LateWait& late = wait_report()->waits[index];
    store_volatile(&late.begin_us, begin_us_);
    store_volatile(&late.file, site_.file);
    store_volatile(&late.at, site_.at);
    store_volatile(&late.barrier, barrier_);
    store_volatile(&late.parity, parity_);
    store_volatile(&late.cta, blockIdx.x);
    store_volatile(&late.thread, threadIdx.x);
    __threadfence_system();
    store_volatile(&late.written, 1u);
    __threadfence_system();
  }

  uint32_t barrier_, parity_;
  WaitSite site_;
  uint32_t begin_us_ = 0, polls_ = 0;
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
