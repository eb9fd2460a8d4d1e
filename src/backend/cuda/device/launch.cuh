// Launches of a run's kernels. Each may start while its predecessor still runs (programmatic
// dependent launch, PDL, from sm_90 on; elsewhere these are ordinary launches).
//
// A kernel starts once every cta of its predecessor has called ptx::launch_dependents or has ended.
// Until it calls ptx::grid_dependency_wait, it may only do work that depends on no other kernel.
// That call returns when all preceding kernels have ended and their writes are visible. Every cta
// of every kernel makes it, so a finished kernel implies that all earlier ones have finished. If a
// kernel calls launch_dependents only after its own wait, then all its successors can rely on
// everything that preceded it (route's results, the batch) as soon as they start.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/device/check.h"
#include "backend/cuda/device/device.h"
#include "backend/cuda/steps/sizes.h"

namespace nvfp4_moe::internal::cuda {

// Runs before a kernel's first launch on the current device, and lets it use all of a cta's shared
// memory. early: whether the device may start it early, which requires code that contains the wait.
// Such kernels also share one division of the multiprocessor's memory: a kernel that needs another
// one would wait until the multiprocessor is empty.
template <auto kKernel>
Status prepare(const char* name, bool& early) {
  static std::atomic<uint64_t> prepared{0}, starts_early{0};  // one bit per device
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

// Enqueues a kernel that may start early; `name` appears in error messages. Every kernel of a run
// is launched by this. cooperative: all ctas are resident at once, so that they may wait for each
// other; the kernel starts once the device has room for all of them.
template <auto kKernel, class... Args>
Status launch_as(bool cooperative, const char* name, dim3 ctas, dim3 threads, int64_t shared_bytes,
                 void* stream, const Args&... args) {
  bool starts_early = false;
  NVFP4_MOE_TRY(prepare<kKernel>(name, starts_early));
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (starts_early) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cooperative) {
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs++].val.cooperative = 1;
  }
  cudaError_t error = cudaLaunchKernelEx(&config, kKernel, args...);
  if (config.numAttrs == 2 && (error == cudaErrorNotSupported || error == cudaErrorInvalidValue)) {
    cudaGetLastError();  // a driver that knows both attributes, but not together
    config.attrs = attributes + 1, config.numAttrs = 1;
    error = cudaLaunchKernelEx(&config, kKernel, args...);
  }
  return check(error, name);
}
template <auto kKernel, class... Args>
Status launch(const char* name, dim3 ctas, dim3 threads, int64_t shared_bytes, void* stream,
              const Args&... args) {
  return launch_as<kKernel>(false, name, ctas, threads, shared_bytes, stream, args...);
}
// launch, on a device that need not be the calling thread's current one. No shared memory.
template <auto kKernel, class... Args>
Status launch_on(int device, const char* name, dim3 ctas, dim3 threads, void* stream,
                 const Args&... args) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  return launch<kKernel>(name, ctas, threads, 0, stream, args...);
}

}  // namespace nvfp4_moe::internal::cuda
