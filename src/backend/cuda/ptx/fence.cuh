// Fences between the generic proxy, which ordinary instructions use to access memory, and the
// asynchronous proxy, which TMA and wgmma use.
#pragma once

#include <cuda_runtime.h>

namespace nvfp4_moe::internal::cuda::ptx {

// fence.proxy.async.shared::cta: orders this thread's writes to shared memory, and those that it
// has observed, before accesses of the asynchronous proxy that it issues or releases afterwards.
__device__ inline void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.proxy.async: the same for all state spaces: writes to global memory before bulk copies that
// read them.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// fence.mbarrier_init.release.cluster and fence.proxy.async: barriers that this thread has
// initialized may be used by other threads after the next barrier of the cta, and by asynchronous
// copies.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::
                   : "memory");
}

}  // namespace nvfp4_moe::internal::cuda::ptx
