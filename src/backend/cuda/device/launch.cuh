// Launches of a walk's kernels, each of which starts while the one before it still runs
// (programmatic dependent launch, PDL, from sm_90 up; elsewhere these are ordinary launches).
//
// A kernel starts once every cta of the one before it has called ptx::launch_dependents or has
// ended. Until it calls ptx::grid_dependency_wait it may do what depends on no other kernel; the
// call returns once all kernels before it have ended and what they wrote is visible. Every cta of
// every kernel makes it, so that "the one before has ended" means all of them. A kernel that calls
// launch_dependents only after it has waited itself gives the next one, and all that follow, what
// was before it as soon as they start: route's results, the batch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/device/check.h"
#include "backend/cuda/steps/sizes.h"

namespace nvfp4_moe::internal::cuda {

// Before a kernel's first launch on the current device: it is allowed all of a cta's shared memory.
// early says whether the device may start it early: its code must be one that waits. Such kernels
// also share one division of the multiprocessor's memory, since a kernel that asks for another
// waits until the multiprocessor is empty.
template <auto kKernel>
Status prepare(const char* name, bool& early) {
  static std::atomic<uint64_t> prepared{0}, starts_early{0};  // a bit a device
  int device = 0;
  NVFP4_MOE_TRY(check(cudaGetDevice(&device), name));
  const uint64_t bit = uint64_t{1} << device % 64;
  if ((prepared.load() & bit) == 0) {
    cudaFuncAttributes attributes{};
    NVFP4_MOE_TRY(check(cudaFuncGetAttributes(&attributes, kKernel), name));
    int cta_shared_bytes = 0;
    NVFP4_MOE_TRY(check(
        cudaDeviceGetAttribute(&cta_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        name));
    NVFP4_MOE_TRY(
        check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   cta_shared_bytes - static_cast<int>(attributes.sharedSizeBytes)),
              name));
    if (attributes.ptxVersion >= 90) {
      NVFP4_MOE_TRY(
          check(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared),
                name));
      starts_early |= bit;
    }
    prepared |= bit;
  }
  early = (starts_early.load() & bit) != 0;
  return {};
}

// Enqueues a kernel that may start early; `name` names it in a failure. Every kernel of a run goes
// through here.
template <auto kKernel, class... Args>
Status launch(const char* name, dim3 ctas, dim3 threads, int64_t shared_bytes, void* stream,
              const Args&... args) {
  bool starts_early = false;
  NVFP4_MOE_TRY(prepare<kKernel>(name, starts_early));
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = starts_early ? 1 : 0;
  return check(cudaLaunchKernelEx(&config, kKernel, args...), name);
}

}  // namespace nvfp4_moe::internal::cuda
