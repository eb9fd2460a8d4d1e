// Workspaces of runs from Python: the caller's, from torch's caching allocator, or the library's
// own memory.
//
// Runs on torch's CUDA tensors use torch memory, so that torch counts it and can reuse it. Outside
// a capture, one tensor per stream is kept and grows with the largest run; finding it costs a mutex
// and no Python. During graph capture each run allocates from the graph's memory and frees it at
// once. The next run of the capture, and captures that share the graph's pool, get the same bytes,
// and the memory lives as long as the graph. Everything else, including host arrays, uses the
// library's memory, kept per stream and per capture.
#pragma once

#include <cstddef>
#include <optional>

#include "backend/backend.h"
#include "moe/workspaces.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

// The kept workspaces of one device.
struct Workspaces {
  Workspaces(const Backend& backend, int device);
  size_t release();  // WorkspacePool::release of both pools

  const DeviceMemory* memory;  // null on the host
  int device;
  WorkspacePool own;
  WorkspacePool torch;
};

// Held while a run is enqueued or, on the host, while it computes. It starts empty, and use() or
// lease() fills it in place, because this is on the path of every call.
class RunWorkspace {
 public:
  RunWorkspace() = default;
  RunWorkspace(const RunWorkspace&) = delete;
  RunWorkspace& operator=(const RunWorkspace&) = delete;

  // Null if empty.
  void* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

  // Uses the caller's array. Checks that it is uint8, contiguous, writable and on the device; the
  // run checks its size.
  void use(const Tensor& array, const Device& device);
  // Takes at least size_bytes for a run in the stream on arrays such as `like`. Needs no
  // interpreter lock.
  Status lease(Workspaces& workspaces, size_t size_bytes, const Tensor& like, void* stream);

 private:
  Status lease_from(WorkspacePool& pool, size_t size_bytes, void* stream, uint64_t capture = 0);

  void* data_ = nullptr;
  size_t size_bytes_ = 0;
  std::optional<WorkspacePool::Lease> lease_;
  std::optional<Buffer> fresh_;  // torch memory, during a capture
};

}  // namespace nvfp4_moe::internal::python
