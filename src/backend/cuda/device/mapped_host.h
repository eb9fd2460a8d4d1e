// Pinned host memory that a device accesses through a device address.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>

#include "backend/cuda/device/device.h"
#include "backend/cuda/device/outside_captures.h"

namespace nvfp4_moe::internal::cuda {

// Zeroed.
inline Status map_host_bytes(int device, size_t size_bytes, void** host, void** on_device) {
  const DeviceGuard guard(device);
  NVFP4_MOE_TRY(guard.status());
  const OutsideCaptures outside;
  void *made = nullptr, *seen = nullptr;
  NVFP4_MOE_TRY(check(cudaHostAlloc(&made, size_bytes, cudaHostAllocMapped), "cudaHostAlloc"));
  if (const Status found =
          check(cudaHostGetDevicePointer(&seen, made, 0), "cudaHostGetDevicePointer");
      !found.ok()) {
    cudaFreeHost(made);
    return found;
  }
  std::memset(made, 0, size_bytes);
  *host = made;
  *on_device = seen;
  return {};
}

// Type: plain data.
template <class Type>
Status make_mapped_host(int device, Type** host, Type** on_device) {
  void *made = nullptr, *seen = nullptr;
  NVFP4_MOE_TRY(map_host_bytes(device, sizeof(Type), &made, &seen));
  *host = static_cast<Type*>(made);
  *on_device = static_cast<Type*>(seen);
  return {};
}

inline void drop_mapped_host(int device, void* host) {
  const DeviceGuard guard(device);
  const OutsideCaptures outside;
  cudaFreeHost(host);
}

}  // namespace nvfp4_moe::internal::cuda
