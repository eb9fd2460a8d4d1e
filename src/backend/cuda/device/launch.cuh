// Launches of a walk's kernels, each of which starts while the one before it still runs (programmatic dependent
// launch, from sm_90 up; elsewhere these are ordinary launches).
//
// A kernel begins once every block of the one before it has called let_next_start or has ended, and may do what depends
// on no other kernel until wait_for_previous, which returns once all kernels before it have ended and what they wrote
// is there. Every block of every kernel calls it, so that "the one before has ended" means all of them. A kernel that
// lets the next one start only after it has waited gives it, and all that follow, what was before it as soon as they
// begin: route's results, the batch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/device/check.h"
#include "backend/cuda/steps/sizes.h"

namespace nvfp4_moe::cuda {

__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether the current device may start this kernel early: its code must be one that waits. Such kernels also share one
// division of the multiprocessor's memory, since a kernel that asks for another waits until the multiprocessor is
// empty.
template <auto kKernel>
bool starts_early() {
  static std::atomic<uint64_t> asked{0}, early{0};  // a bit a device
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << device % 64;
  if ((asked.load() & bit) == 0) {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, kKernel) == cudaSuccess && attributes.ptxVersion >= 90) {
      cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
      early |= bit;
    }
    asked |= bit;
  }
  return (early.load() & bit) != 0;
}

// Enqueues a kernel that may start early; `name` is what a failure is told with. Every kernel of a run goes through here.
template <auto kKernel, class... Args>
Status launch(const char* name, dim3 ctas, dim3 threads, int64_t shared_bytes, void* stream, const Args&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = starts_early<kKernel>() ? 1 : 0;
  if (shared_bytes > kSharedBytesOfAll)
    NVFP4_MOE_TRY(check(
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        name));
  return check(cudaLaunchKernelEx(&config, kKernel, args...), name);
}

}  // namespace nvfp4_moe::cuda
