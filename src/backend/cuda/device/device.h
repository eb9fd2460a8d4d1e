// CUDA devices and their memory: facts, allocation, copies, and a guard that makes a device
// current.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "backend/backend.h"
#include "backend/cuda/device/check.h"

namespace nvfp4_moe::internal::cuda {

// Makes `device` current for the calling thread until the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const Status& status() const { return status_; }

 private:
  int previous_ = -1;  // -1: nothing to restore
  Status status_;
};

// Device memory of at least size_bytes, aligned to 256 bytes, not zeroed. Allocating and freeing
// are allowed while a stream is captured: both take effect at once and are not part of the graph.
// purpose: named in the message of kOutOfMemory.
Result<Buffer> allocate(size_t size_bytes, int device, const char* purpose);
// The same from the device's pool, usable in every stream, and freed in the order of *release_in.
// Freeing it waits for nothing. cudaFree, in contrast, waits for the kernels of all streams, and
// until then other threads cannot launch any.
Result<Buffer> allocate_pooled(size_t size_bytes, int device, const char* purpose,
                               cudaStream_t stream, std::shared_ptr<void*> release_in);
// From now on `allocate` takes pooled memory in the calling thread, freed in the order of `stream`.
void use_pool_in_this_thread(cudaStream_t stream);
Status to_device(int device, void* to, const void* from, size_t size_bytes, void* stream);
Status to_host(int device, void* to, const void* from, size_t size_bytes, void* stream);

Status gather_rows(int device, void* to, const void* from, int64_t rows, int64_t row_bytes,
                   int64_t stride_bytes, void* stream);

Status synchronize(int device);
Result<uint64_t> capture_id(void* stream);

}  // namespace nvfp4_moe::internal::cuda
