// Fences between the generic proxy, through which ordinary instructions access memory, and the
// asynchronous one, through which TMA and wgmma do.
#pragma once

#include <cuda_runtime.h>

namespace nvfp4_moe::internal::cuda::ptx {

// fence.proxy.async.shared::cta: what this thread has written to shared memory, or has seen
// written, comes before accesses of the asynchronous proxy that it issues or releases afterwards.
__device__ inline void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.mbarrier_init.release.cluster and fence.proxy.async: barriers that this thread has
// initialized may be used by other threads after the next barrier of the cta, and by asynchronous
// copies.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::
                   : "memory");
}

}  // namespace nvfp4_moe::internal::cuda::ptx
